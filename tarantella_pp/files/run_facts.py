"""What a run is made of: its model, its optimizer and its data, as far as they can be compared."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files.manifest import Manifest, plain
from tarantella_pp.internals.optimizers import settable_learning_rate, wrapped_in
from tarantella_pp.internals.state import compiled_with
from tarantella_pp.runtime.comm.collective import compiled_facts, hidden_options
from tarantella_pp.runtime.weights.optimizer_state import spec_of

_PACKAGES = ("tarantella-pp", "keras", "tensorflow", "tensorflow-cpu", "numpy")
_MOST_DIFFERENCES = 5
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBERED = (
    # Keras counts layers, so that the second `Dense` of a process has another name, and objects
    # that several layers share have an address.
    "name", "shared_object_id",
    # These refer to layers by name; how layers hang together is part of the fingerprint.
    "inbound_nodes", "input_layers", "output_layers",
    # The model may have been compiled before it was wrapped.
    "compile_config",
)  # fmt: skip


def facts_of(model: Any, configs: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """What must be the same for training to go on, as JSON keeps it."""
    engine, given = model._engine, compiled_with(model)
    compiled = configs["compiled"] or compiled_facts(given)
    optimizer = keras.saving.serialize_keras_object(wrapped_in(model.optimizer))
    return as_json(
        {
            "variables": {
                str(i): [v.name, *spec_of(v), bool(v.trainable)]
                for i, v in enumerate(engine.weights.variables)
            },
            "model": engine.extracted.graph.fingerprint(),
            "layers": configs["config"],
            "compiled": {name: compiled.get(name) for name in _COMPILED},
            "options": {
                name: [hidden_options(each) for each in keras.tree.flatten(given[name])]
                for name in _COMPILED
            },
            "optimizer": {name: optimizer[name] for name in ("class_name", "config")},
            "data": dict(data),
        }
    )


def configs_of(model: Any) -> dict[str, Any]:
    """What makes a model like this one again: of itself, its optimizer and its compilation."""
    made_of = {
        "config": lambda: keras.saving.serialize_keras_object(model._engine.extracted.model),
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


def has_plan(saved: Manifest, plan: Any) -> bool:
    """Whether a checkpoint was written with the stages, replicas and micro-batches of a plan."""
    now = json.loads(plan.to_json())
    names = ("assignment", "num_micro_batches", "num_replicas", "recompute", "except_last")
    return all((saved.plan.get(name) or []) == (now.get(name) or []) for name in names)


def refuse_others(saved: Manifest, facts: dict[str, Any], rate: float | None, where: str) -> None:
    """Refuses to go on with a checkpoint of something else."""
    facts = {name: facts[name] for name in facts if name in saved.facts}
    found = differences(_comparable(saved.facts), _comparable(facts))
    began = saved.facts.get("optimizer", {}).get("config", {}).get("learning_rate")
    if isinstance(began, float) and rate not in (began, saved.learning_rate):
        found.append(f"optimizer.config.learning_rate: {began!r} in the checkpoint, {rate!r} now")
    if found:
        raise ConfigurationError(
            f"Checkpoint '{where}' is one of another run: {'; '.join(found)}. Go on with what it "
            "was written with, or give this run a directory of its own; `tarantella checkpoint "
            "convert` makes a file of weights to begin with."
        )


def learning_rate_of(model: Any) -> float | None:
    """The learning rate that callbacks may change; `None` where a schedule sets it."""
    rate = settable_learning_rate(model)
    return None if math.isnan(rate) else rate


def versions() -> dict[str, str]:
    """The versions of the packages that numbers depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The time, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def as_json(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(plain(value), default=str))


def _comparable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without what a process numbers, and without a rate that callbacks may have changed."""
    found: dict[str, Any] = without_names(facts)
    optimizer = found.get("optimizer", {})
    if isinstance(optimizer.get("config", {}).get("learning_rate"), float):
        del optimizer["config"]["learning_rate"]
    optimizer.pop("loss_scaling", None)  # in checkpoints of older versions
    return found


def without_names(config: Any) -> Any:
    """A configuration as it is in each process that makes the same."""
    if isinstance(config, Mapping):
        return {key: without_names(value) for key, value in config.items() if key not in _NUMBERED}
    return [without_names(value) for value in config] if isinstance(config, list) else config


def differences(saved: Any, now: Any) -> list[str]:
    """What differs, each with its name and both values; at most a few."""
    found = list(_differences(saved, now, ""))
    more = [f"and {len(found) - _MOST_DIFFERENCES} more"] if len(found) > _MOST_DIFFERENCES else []
    return found[:_MOST_DIFFERENCES] + more


def _differences(saved: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            inner = f"{where}.{key}" if where else str(key)
            yield from _differences(saved.get(key), now.get(key), inner)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(before, after, f"{where}[{number}]")
    elif saved != now:
        yield f"{where}: {_short(saved)} in the checkpoint, {_short(now)} now"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
