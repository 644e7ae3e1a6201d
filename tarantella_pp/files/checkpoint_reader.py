"""What a checkpoint holds, given back to model, optimizer, metrics and callbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files.checkpoint_folder import checkpoints_in, damages
from tarantella_pp.files.manifest import MANIFEST, Manifest, from_plain, read_manifest
from tarantella_pp.files.tensor_file import TensorFile, sha256_of
from tarantella_pp.internals.data import remind
from tarantella_pp.internals.optimizers import wrapped_in
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_tensor
from tarantella_pp.runtime.weights.optimizer_state import StateShare, spec_of

Array = np.ndarray[Any, Any]


class RestoredState:
    """What a checkpoint holds, each rank reading what it needs."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._files: dict[int, TensorFile] = {}

    def restore(self, model: Any, share: StateShare) -> None:
        """Gives the model and its optimizer their values; takes all ranks."""
        self._assign(share.needed())
        # What other ranks train is out of date here from now on, as after a step.
        model._engine.weights.clock.advance()

    def restore_logs(self, model: Any) -> None:
        """Gives the epoch the logs so far, which stay if no batch follows."""
        model._engine.logs = from_plain(self.manifest.logs)

    def restore_metrics_later(self, model: Any, share: StateShare) -> None:
        """Gives metrics their values, once the first batch has made their variables."""
        engine = model._engine
        engine.before_training = lambda: self._assign(share.metrics())

    def restore_learning_rate(self, model: Any) -> None:
        """Sets the learning rate once more, after schedules have set the rate of the epoch."""
        if self.manifest.learning_rate is not None:
            wrapped_in(model.optimizer).learning_rate = self.manifest.learning_rate

    def remind(self, callbacks: Sequence[Any]) -> None:
        """Gives callbacks of Keras what they remembered."""
        left = list(enumerate(self.manifest.callbacks))
        for callback in callbacks:
            kind = type(callback).__name__
            found = next((entry for entry in left if entry[1][0] == kind), None)
            if found is None:
                continue
            left.remove(found)
            number, (_, remembered) = found
            remind(callback, from_plain(remembered))
            best = self._list(f"best/{number}/")
            if best and getattr(callback, "restore_best_weights", False):
                callback.best_weights = best

    def arrays(self, kind: str) -> dict[str, Array]:
        """Arrays of a kind, by the rest of their keys."""
        return {
            key.removeprefix(f"{kind}/"): self._read(key)
            for key in self.manifest.tensors
            if key.startswith(f"{kind}/")
        }

    def complete_history(self, model: Any) -> None:
        """Puts the epochs before the checkpoint into the history of this `fit`."""
        history = model.history
        values = from_plain(self.manifest.history)
        history.history.update({name: list(kept) for name, kept in values.items()})
        first, last = self.manifest.initial_epoch, self.manifest.epoch
        history.epoch[:] = list(range(first, last))

    def _list(self, prefix: str) -> list[Array]:
        count = sum(key.startswith(prefix) for key in self.manifest.tensors)
        return [self._read(f"{prefix}{i}") for i in range(count)]

    def _assign(self, variables: Mapping[str, Any]) -> None:
        for key, variable in variables.items():
            saved = self.manifest.tensors.get(key)
            if saved is None or (saved.dtype, saved.shape) != spec_of(variable):
                what = "nothing" if saved is None else f"{saved.dtype} of shape {saved.shape}"
                dtype, shape = spec_of(variable)
                raise ConfigurationError(
                    f"Checkpoint '{self._folder}' is one of another run: it has {what} for "
                    f"'{variable.path}' ({key}), which is {dtype} of shape {shape}."
                )
            variable.assign(to_tensor(self._read(key)))

    def _read(self, key: str) -> Array:
        number = self.manifest.tensors[key].file
        if number not in self._files:
            self._files[number] = TensorFile(self._folder / self.manifest.files[number].name)
        return self._files[number].read(key)


logger = logging.getLogger(__name__)


def newest_whole(ranks: Communicator, directory: Path) -> tuple[Path, Manifest, list[str]] | None:
    """Finds the newest checkpoint with right checksums; collective, each rank reads some files."""
    names = _seen_by_all(ranks, directory)
    damaged: list[str] = []
    for name in names:
        mine = next(damages(directory / name, lambda n: n % ranks.size == ranks.rank), "")
        problem = next(filter(None, ranks.allgather_json(mine)), "")
        if not problem:
            return directory / name, read_manifest(directory / name), damaged
        damaged.append(name)
        if ranks.rank == ranks.size - 1:
            logger.warning("checkpoint '%s' is damaged: %s", directory / name, problem)
    if damaged:
        raise FileError(
            f"All checkpoints in '{directory}' are damaged: {', '.join(damaged)}. "
            "`tarantella checkpoint verify` names what is damaged in each. Remove them to begin "
            "anew."
        )
    return None


def _seen_by_all(ranks: Communicator, directory: Path) -> list[str]:
    """The names of the checkpoints, the newest first, if all ranks see the same."""
    mine = [path.name for path in checkpoints_in(directory)]
    names: list[str] = ranks.broadcast_json(mine)
    prints = [_fingerprint(directory / name / MANIFEST) for name in names]
    seen_by = ranks.allgather_json([bool(mine), prints])
    odd = [
        rank
        for rank, (has_any, seen) in enumerate(seen_by)
        if seen != seen_by[0][1] or (has_any and not names)
    ]
    if odd:
        raise ConfigurationError(
            f"All ranks must see the same checkpoints in '{directory}'. Received: "
            f"{names or 'none'} on rank 0, others on ranks {odd}. Use a directory on a disk that "
            "all hosts share."
        )
    return names


def _fingerprint(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return "none"
