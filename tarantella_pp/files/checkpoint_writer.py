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

from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files import checkpoint_folder
from tarantella_pp.files.manifest import Manifest, SavedFile, SavedTensor
from tarantella_pp.files.tensor_file import write_tensors
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
        self._begun = False

    def prepare(self) -> None:
        """Makes sure that there is a directory to write to; takes all ranks."""
        self._on_all("", self._try)

    def write(
        self,
        step: int,
        own: Mapping[str, Any],
        describe: Callable[[tuple[SavedFile, ...], dict[str, SavedTensor]], Manifest],
        damaged: Sequence[str],
    ) -> Path:
        """Writes one; takes all ranks."""
        name = checkpoint_folder.name_of_step(step)
        draft = Path(self._on_all(name, self._begin, step)[0])
        try:
            answers = self._on_all(name, self._write_own, draft, own)
            self._on_all(name, self._publish, draft, lambda: describe(*_gathered(answers)))
        except FileError:
            if self._ranks.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        self._known.add(name)
        self._remove_old([other for other in damaged if other != name])
        return self._directory / name

    def _try(self) -> None:
        if self._ranks.rank == 0:
            self._new_draft(0).rmdir()

    def _begin(self, step: int) -> str:
        """Makes the folder that all ranks write into; rank 0 tells which."""
        return str(self._new_draft(step)) if self._ranks.rank == 0 else ""

    def _new_draft(self, step: int) -> Path:
        if not self._begun:
            checkpoint_folder.remove_leftovers(self._directory)
            self._begun = True
        return checkpoint_folder.begin_draft(self._directory, step, self._known)

    def _write_own(self, draft: Path, own: Mapping[str, Any]) -> list[Any]:
        """Writes this rank's file; returns what it tells of it."""
        if not own:
            return []
        path = draft / f"rank-{self._ranks.rank:05d}.safetensors"
        specs = {key: _spec(value) for key, value in own.items()}
        written = write_tensors(path, specs, lambda key: _array(own[key]))
        labels = {key: getattr(value, "path", key) for key, value in own.items()}
        tensors = [[key, labels[key], *specs[key]] for key in own]
        return [path.name, *written, self._ranks.rank, list(self._stages), tensors]

    def _publish(self, draft: Path, describe: Callable[[], Manifest]) -> None:
        if self._ranks.rank == 0:
            checkpoint_folder.publish(draft, describe().encode())

    def _remove_old(self, damaged: Sequence[str]) -> None:
        if self._ranks.rank != 0:
            return
        try:
            checkpoint_folder.remove_old(self._directory, self._keep, self._known, damaged)
        except OSError as error:
            logger.warning("could not remove old checkpoints in '%s': %s", self._directory, error)

    # A rank that failed alone would leave the others waiting: so all say how it went before they
    # go on, and one that fails ends the writing on every rank.
    def _on_all(self, name: str, work: Callable[..., _T], *arguments: Any) -> list[_T]:
        """Has every rank do its part; a failure of one is the same error on all."""
        result: Any = None
        reason = ""
        try:
            result = work(*arguments)
        except FileNotFoundError:
            reason = (
                "its folder is not there; the directory must be on a disk that all ranks see, and "
                "no other job may begin in it"
            )
        except (OSError, shutil.Error) as error:
            reason = error.strerror or str(error)
        except ConfigurationError as error:
            reason = str(error)
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
    """The files of all ranks, and their tensors."""
    files: list[SavedFile] = []
    tensors: dict[str, SavedTensor] = {}
    for name, size, sha256, rank, stages, found in filter(None, answers):
        for key, label, dtype, shape in found:
            tensors[key] = SavedTensor(label, dtype, tuple(shape), len(files))
        files.append(SavedFile(name, size, sha256, rank, tuple(stages)))
    return tuple(files), tensors


def _spec(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape
    return spec_of(value)


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value if isinstance(value, np.ndarray) else value_of(value)
