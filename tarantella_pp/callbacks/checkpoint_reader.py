"""Finds the checkpoint that a run goes on from, and gives a model back what it holds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tarantella_pp.callbacks.checkpoint_folder import (
    MANIFEST,
    Manifest,
    checkpoints_in,
    damages,
    put_back,
    read_manifest,
)
from tarantella_pp.callbacks.tensor_file import TensorFile, sha256_of
from tarantella_pp.errors import ConfigurationError, FileError, FormatError
from tarantella_pp.internals.parted import columns_in, put_together
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_tensor
from tarantella_pp.runtime.weights.optimizer_state import spec_of

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]


class RestoredState:
    """What a checkpoint holds, each rank reading what it needs."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._files: dict[int, TensorFile] = {}

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
        number = self.manifest.tensors[key].file
        if number not in self._files:
            self._files[number] = TensorFile(self._folder / self.manifest.files[number].name)
        return self._files[number].read(key)


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
