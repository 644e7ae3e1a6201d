"""The checkpoint that a run goes on from: found, compared with the run, given back to the model."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tarantella_pp.callbacks.checkpoint_folder import (
    MANIFEST,
    Array,
    Manifest,
    TensorFile,
    checkpoints_in,
    damages,
    put_back,
    read_manifest,
    sha256_of,
)
from tarantella_pp.errors import ConfigurationError, FileError, FormatError
from tarantella_pp.internals.optimizers import wrapped_in
from tarantella_pp.internals.parted import columns_in, put_together, wholes
from tarantella_pp.internals.state import compiled_with
from tarantella_pp.runtime.comm.collective import compiled_facts, nameless
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_tensor
from tarantella_pp.runtime.weights.optimizer_state import spec_of

logger = logging.getLogger(__name__)


class RestoredState:
    """What a checkpoint holds, each rank reading what it needs."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        names = [file.name for file in manifest.files]
        self._file = functools.cache(lambda number: TensorFile(folder / names[number]))

    def restore(self, model: Any, share: Any) -> None:
        """Gives the model and its optimizers their values; takes all ranks."""
        if trained := self.arrays("trained"):  # of a model with steps of its own
            share.build(trained)
        self.assign(share.needed())
        # What other ranks train is out of date here from now on, as after a step.
        model._engine.weights.clock.advance()

    def arrays(self, kind: str) -> dict[str, Array]:
        """Arrays of a kind, by the rest of their keys."""
        keys = [key for key in self.manifest.tensors if key.startswith(f"{kind}/")]
        return {key.removeprefix(f"{kind}/"): self._read(key) for key in keys}

    def assign(self, variables: Mapping[str, Any]) -> None:
        """Gives variables the values that are kept under their keys."""
        for key, variable in variables.items():
            saved, (dtype, shape) = self._value(key), spec_of(variable)
            if saved is None or (saved.dtype.name, saved.shape) != (dtype, shape):
                what = "nothing" if saved is None else f"{saved.dtype} of shape {saved.shape}"
                raise ConfigurationError(
                    f"Checkpoint '{self._folder}' is one of another run: it has {what} for "
                    f"'{variable.path}' ({key}), which is {dtype} of shape {shape}."
                )
            variable.assign(to_tensor(saved))

    def _value(self, key: str) -> Array | None:
        """What is kept under a key, put together and cut where the run had it in other parts."""
        if key in self.manifest.tensors:
            return self._read(key)
        kind, number, *columns = key.split("/")
        start = f"{kind}/{number}"
        parts = [k for k in self.manifest.tensors if f"{k}/".startswith(f"{start}/")]
        if not parts:
            return None
        whole = put_together({k[len(start) + 1 :]: self._read(k) for k in parts})
        return np.ascontiguousarray(columns_in(whole, *columns or [""]))

    def _read(self, key: str) -> Array:
        return self._file(self.manifest.tensors[key].file).read(key)


def newest_whole(ranks: Communicator, directory: Path) -> tuple[Path, Manifest] | None:
    """Finds the newest checkpoint with right checksums; collective, each rank reads some files."""
    if ranks.rank == 0:
        with contextlib.suppress(OSError):  # without it, one before it is taken
            put_back(directory)
    ranks.barrier()
    names = _seen_by_all(ranks, directory)
    for name in names:
        mine = ["", ""]  # its damage, or that it has another format
        try:
            mine[0] = next(damages(directory / name, lambda n: n % ranks.size == ranks.rank), "")
        except FormatError as error:
            mine[1] = str(error)
        problem, other = (
            next(filter(None, told), "") for told in zip(*ranks.allgather_json(mine), strict=True)
        )
        if other:
            raise FormatError(other)
        if not problem:
            return directory / name, read_manifest(directory / name)
        if ranks.prints:
            logger.warning("checkpoint '%s' is damaged: %s", directory / name, problem)
    if names:
        raise FileError(
            f"All checkpoints in '{directory}' are damaged: {', '.join(names)}. "
            "`tarantella checkpoint verify` names what is damaged in each. Remove them to begin "
            "anew."
        )
    return None


def _seen_by_all(ranks: Communicator, directory: Path) -> list[str]:
    """The names of the checkpoints, the newest first, if all ranks see the same."""
    mine = [
        [path.name, sha256_of(path / MANIFEST) if (path / MANIFEST).is_file() else "none"]
        for path in checkpoints_in(directory)
    ]
    seen_by = ranks.allgather_json(mine)
    if odd := [rank for rank, seen in enumerate(seen_by) if seen != seen_by[0]]:
        raise ConfigurationError(
            f"All ranks must see the same checkpoints in '{directory}'. Received: "
            f"{[name for name, _ in seen_by[0]] or 'none'} on rank 0, others on ranks {odd}. Use a "
            "directory on a disk that all hosts share."
        )
    return [name for name, _ in mine]


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
            "model": engine.plan and engine.extracted.looked.readings[0].graph.fingerprint(),
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
    compiled = dict(facts["compiled"])
    if isinstance(compiled.get(_RATE), float):
        del compiled[_RATE]
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
