"""What a run is made of: its model, its optimizer and its data, as far as they can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tarantella_pp.callbacks.checkpoint_folder import Manifest
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import wrapped_in
from tarantella_pp.internals.parted import wholes
from tarantella_pp.internals.state import compiled_with
from tarantella_pp.runtime.comm.collective import compiled_facts, nameless
from tarantella_pp.runtime.weights.optimizer_state import spec_of

_MOST_DIFFERENCES = 5
_RATE = "optimizer.learning_rate"
_NUMBERED = (
    # Keras counts layers, so that the second `Dense` of a process has another name, and objects
    # that several layers share have an address.
    "name", "shared_object_id",
    # These refer to layers by name; how layers hang together is part of the fingerprint.
    "inbound_nodes", "input_layers", "output_layers",
    # The model may have been compiled before it was wrapped, or built only by training.
    "compile_config", "build_config",
)  # fmt: skip


def facts_of(model: Any, data: Mapping[str, Any]) -> Any:
    """What must be the same for training to go on, besides the model's configuration."""
    engine = model._engine
    compiled = compiled_facts({**compiled_with(model), "optimizer": wrapped_in(model.optimizer)})
    del compiled["steps_per_execution"]
    return as_json(
        {
            "variables": [
                [v.name, *spec_of(v), bool(v.trainable)] for v in wholes(engine.weights.variables)
            ],
            "model": engine.plan and engine.extracted.readings[0].graph.fingerprint(),
            "compiled": compiled,
            "floatx": keras.config.floatx(),
            "data": dict(data),
        }
    )


def configs_of(model: Any) -> dict[str, Any]:
    """What makes a model like this one again: of itself, its optimizer and its compilation."""
    made_of = {
        "config": lambda: keras.saving.serialize_keras_object(model._wrapped),
        "optimizer": lambda: keras.saving.serialize_keras_object(model.optimizer),
        "compiled": model.get_compile_config,
    }
    found: dict[str, Any] = {}
    for name, describe in made_of.items():
        try:
            found[name] = as_json(describe())
        except Exception:  # whatever layers, losses and metrics of others raise
            found[name] = None
    return found


def refuse_others(
    saved: Manifest, facts: Mapping[str, Any], config: Any, rate: float | None, where: str
) -> None:
    """Refuses to go on with a checkpoint of something else."""
    # A fact that an older version did not write down is not known to differ.
    before = _comparable({**facts, **saved.facts}, saved.config)
    found = differences(before, _comparable(facts, config), _MOST_DIFFERENCES)
    began = saved.facts["compiled"].get(_RATE)
    if isinstance(began, float) and rate not in (began, saved.learning_rate):
        found.append(f"compiled.{_RATE}: {began!r} in the checkpoint, {rate!r} now")
    if found:
        raise ConfigurationError(
            f"Checkpoint '{where}' is one of another run: {'; '.join(found)}. Go on with what it "
            "was written with, or give this run a directory of its own; `tarantella checkpoint "
            "convert` makes a file of weights to begin with."
        )


def as_json(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(value, default=str))


def _comparable(facts: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Facts without what a process numbers, and without a rate that callbacks may have changed."""
    compiled = {
        name: value
        for name, value in facts["compiled"].items()
        if name != _RATE or not isinstance(value, float)
    }
    layers = nameless(config, _NUMBERED)
    return {"layers": layers, **facts, "compiled": nameless(compiled, _NUMBERED)}


def differences(saved: Any, now: Any, most: int) -> list[str]:
    """What differs, each with its name and both values; at most a few."""
    before, after = dict(_flat(saved)), dict(_flat(now))
    found = [
        f"{name}: {_short(before.get(name))} in the checkpoint, {_short(after.get(name))} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    return found[:most] + [f"and {len(found) - most} more"] * (len(found) > most)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All that is in a nested value, by its place."""
    if not isinstance(value, (dict, list)) or not value:
        yield name, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        place = f"{name}[{key}]" if isinstance(value, list) else f"{name}.{key}"
        yield from _flat(part, place.removeprefix("."))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
