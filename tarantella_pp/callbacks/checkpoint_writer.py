r"""Writes a checkpoint: every rank its own file, side by side, and all of it or nothing.

rank 0   empty folder      its file   manifest, its name   older ones go
                 \         ........  /
rank 1            `-> wait its file `   wait
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tarantella_pp.callbacks import checkpoint_folder
from tarantella_pp.callbacks.checkpoint_folder import FORMAT, Manifest, SavedFile, SavedTensor
from tarantella_pp.callbacks.tensor_file import write_tensors
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.weights.optimizer_state import spec_of

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class CheckpointWriter:
    """Writes the checkpoints of one job into a directory."""

    def __init__(
        self, ranks: Communicator, directory: Path, keep: int, stages: Sequence[int]
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._keep = keep
        self._stages = tuple(stages)
        self._known = {path.name for path in checkpoint_folder.checkpoints_in(directory)}

    def prepare(self) -> None:
        """Makes sure that there is a directory to write to; takes all ranks."""

        def prepare() -> None:
            checkpoint_folder.remove_leftovers(self._directory)
            checkpoint_folder.begin_draft(self._directory, 0, self._known).rmdir()

        self._on_first("", prepare)

    def write(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Writes this rank's tensors, and the first rank's state; takes all ranks."""
        directory, name = self._directory, checkpoint_folder.name_of_step(state["step"])
        begin = checkpoint_folder.begin_draft
        draft = Path(
            self._on_first(name, lambda: str(begin(directory, state["step"], self._known)))
        )
        try:
            written = self._on_all(name, lambda: self._write_own(draft, own))
            files, tensors = _gathered(written)
            manifest = Manifest(format=FORMAT, files=files, tensors=tensors, **state)
            self._on_first(name, lambda: checkpoint_folder.publish(draft, manifest.encode()))
        except FileError:
            if self._ranks.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        self._known.add(name)
        if self._ranks.rank == 0:
            try:
                checkpoint_folder.remove_old(directory, self._keep, name, self._known)
            except OSError as error:
                logger.warning("could not remove old checkpoints in '%s': %s", directory, error)

    def _write_own(self, draft: Path, own: Mapping[str, Any]) -> list[Any]:
        """Writes this rank's file; returns what it tells of it."""
        if not own:
            return []
        path = draft / f"rank-{self._ranks.rank:05d}.safetensors"

        def value(key: str) -> np.ndarray[Any, Any]:
            given = own[key]
            return given if isinstance(given, np.ndarray) else value_of(given)

        specs = {
            key: (each.dtype.name, each.shape) if isinstance(each, np.ndarray) else spec_of(each)
            for key, each in own.items()
        }
        written = write_tensors(path, specs, value)
        tensors = [[key, getattr(own[key], "path", key), *specs[key]] for key in own]
        return [path.name, *written, self._ranks.rank, self._stages, tensors]

    def _on_first(self, name: str, work: Callable[[], _T]) -> _T:
        return self._on_all(name, work if self._ranks.rank == 0 else lambda: None)[0]  # type: ignore[return-value]

    # A rank that failed alone would leave the others waiting: so all say how it went before they
    # go on, and one that fails ends the writing on every rank.
    def _on_all(self, name: str, work: Callable[[], _T]) -> list[_T]:
        """Has every rank do its part; a failure of one is the same error on all."""
        result: Any = None
        reason = ""
        try:
            result = work()
        except FileNotFoundError:
            reason = "its folder is not there; all ranks must see the directory, and no other job "
            reason += "may begin in it"
        except (OSError, ConfigurationError) as error:
            reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
        answers = self._ranks.allgather_json([reason, result])
        for rank, (problem, _) in enumerate(answers):
            if problem:
                raise FileError(
                    f"Rank {rank} could not write a checkpoint, '{self._directory / name}': "
                    f"{problem}. Older checkpoints are unchanged."
                )
        return [value for _, value in answers]


def _gathered(
    answers: Sequence[list[Any]],
) -> tuple[tuple[SavedFile, ...], dict[str, SavedTensor]]:
    files: list[SavedFile] = []
    tensors: dict[str, SavedTensor] = {}
    for name, size, sha256, rank, stages, found in filter(None, answers):
        for key, label, dtype, shape in found:
            tensors[key] = SavedTensor(label, dtype, tuple(shape), len(files))
        files.append(SavedFile(name, size, sha256, rank, tuple(stages)))
    return tuple(files), tensors
