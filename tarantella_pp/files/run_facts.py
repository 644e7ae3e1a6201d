"""What a run is made of: its model, its optimizer and its data, as far as they can be config."""

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
_OF_LOSS_SCALING = ("initial_scale", "dynamic_growth_steps")
_MOST_DIFFERENCES = 5
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")


def facts_of(model: Any, configs: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for training to go on, as JSON keeps it."""
    facts = (
        facts_of_model(model, configs) | facts_of_compilation(model, configs) | {"data": dict(data)}
    )
    found: dict[str, Any] = as_json(facts)
    return found


def facts_of_model(model: Any, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `facts_of` that needs no compiled model."""
    variables = {
        str(i): [v.name, *spec_of(v), bool(v.trainable)]
        for i, v in enumerate(model._engine.weights.variables)
    }
    graph, layers = model._engine.extracted.graph, without_names(configs["config"])
    return {"variables": variables, "model": graph.fingerprint(), "layers": layers}


def facts_of_compilation(model: Any, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `facts_of` that `compile` was given."""
    given = compiled_with(model)
    compiled = configs["compiled"] or as_json(compiled_facts(given))
    return {
        "compiled": without_names({name: compiled.get(name) for name in _COMPILED}),
        "options": {name: _options_of(given[name]) for name in _COMPILED},
        "optimizer": _optimizer_facts(model.optimizer),
    }


def config_of(model: Any) -> Any:
    """The configuration of the wrapped model, as JSON keeps it; `None` if it has none."""
    try:
        return as_json(keras.saving.serialize_keras_object(model._engine.extracted.model))
    except Exception:  # whatever layers of others raise that cannot be saved
        return None


def configs_of(model: Any) -> dict[str, Any]:
    """What makes a model like this one again: of itself, its optimizer and its compilation."""
    try:
        compiled = as_json(model.get_compile_config())
    except Exception:  # whatever losses and metrics of others raise that cannot be saved
        compiled = None
    optimizer = getattr(model, "optimizer", None)
    optimizer = optimizer and as_json(keras.saving.serialize_keras_object(optimizer))
    return {"config": config_of(model), "optimizer": optimizer, "compiled": compiled}


def has_plan(saved: Manifest, plan: Any) -> bool:
    """Whether a checkpoint was written with the stages, replicas and micro-batches of a plan."""
    now = json.loads(plan.to_json())
    names = ("assignment", "num_micro_batches", "num_replicas", "recompute", "except_last")
    return all((saved.plan.get(name) or []) == (now.get(name) or []) for name in names)


def refuse_others(saved: Manifest, facts: dict[str, Any], rate: float | None, where: str) -> None:
    """Refuses to go on with a checkpoint of something else."""
    facts = {name: facts[name] for name in facts if name in saved.facts}
    before, now = _comparable(saved.facts), _comparable(facts)
    found = differences(before, now)
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
    """Those of the packages that numbers depend on."""
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


def _options_of(given: Any) -> list[dict[str, Any]]:
    """Options of losses or metrics that their configurations leave out."""
    return [hidden_options(each) for each in keras.tree.flatten(given)]


def _optimizer_facts(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    inner = wrapped_in(optimizer)
    config = without_names(as_json(keras.saving.serialize_keras_object(inner)))
    found = {"class_name": config["class_name"], "config": config["config"]}
    if inner is not optimizer:
        options = as_json(optimizer.get_config())
        found["loss_scaling"] = {name: options.get(name) for name in _OF_LOSS_SCALING}
    return found


def _comparable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without a learning rate that callbacks may have changed, and without repetitions."""
    optimizer, layers = dict(facts.get("optimizer", {})), facts["layers"]
    config = dict(optimizer.get("config", {}))
    if isinstance(config.get("learning_rate"), float):
        del config["learning_rate"]
    if isinstance(layers, Mapping):  # the model may have been compiled before it was wrapped
        layers = {name: config for name, config in layers.items() if name != "compile_config"}
    return {**facts, "layers": layers, "optimizer": {**optimizer, "config": config}}


def differences(saved: Any, now: Any, where: str = "") -> list[str]:
    """What differs, each with its name and both values; at most a few."""
    found = list(_differences(saved, now, where))
    more = [f"and {len(found) - _MOST_DIFFERENCES} more"] if len(found) > _MOST_DIFFERENCES else []
    return found[:_MOST_DIFFERENCES] + more


def without_names(config: Any) -> Any:
    """The configuration of a model as it is in each process: layers have numbers for names.

    Keras counts layers, so that the second `Dense` of a process is called otherwise; and objects
    that several layers share have their address for a number.
    """
    names: dict[str, str] = {}
    _collect(config, names)
    return _renamed(config, names)


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


def _collect(config: Any, names: dict[str, str]) -> None:
    if isinstance(config, Mapping):
        name = config.get("name")
        if isinstance(name, str):
            names.setdefault(name, f"#{len(names)}")
        for value in config.values():
            _collect(value, names)
    elif isinstance(config, list):
        for value in config:
            _collect(value, names)


def _renamed(config: Any, names: Mapping[str, str]) -> Any:
    if isinstance(config, Mapping):
        kept = {key: value for key, value in config.items() if key != "shared_object_id"}
        return {key: _renamed(value, names) for key, value in kept.items()}
    if isinstance(config, list):
        return [_renamed(value, names) for value in config]
    return names.get(config, config) if isinstance(config, str) else config
