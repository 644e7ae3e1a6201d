r"""Writes a checkpoint while training goes on: all of it or nothing.

main threads             a thread of each rank, without messages
rank 0   empty folder    its file, its part   waits for parts, manifest, its name, older ones go
                 \                       ^
rank 1            `->    its file, its part

A part describes a file that is on the disk. Before the next checkpoint, and at the end of training,
all ranks hear how it went; a rank that could not write asks all of them to stop after a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tarantella_pp.callbacks import checkpoint_folder
from tarantella_pp.callbacks.checkpoint_folder import FORMAT, Manifest, SavedFile, SavedTensor
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.machine import free_memory, memory_of_each_rank
from tarantella_pp.runtime.comm.tensor_buffers import buffer_of, variable_bytes
from tarantella_pp.runtime.weights.optimizer_state import spec_of

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_THREAD = "tarantella-checkpoint"
_POLL_SECONDS = 0.05
# A file in the draft: a rank has failed, and the others shall not rest while it waits for them.
_HURRY = "hurry"
# After an error, which ends the job once it leaves `fit`: for the checkpoint that is being written.
_PATIENCE_SECONDS = 30.0
_LOWEST_PRIORITY = 19


class CheckpointWriter:
    """Writes the checkpoints of one `fit` into a directory."""

    def __init__(
        self, ranks: Communicator, directory: Path, keep: int, stages: Sequence[int]
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._keep = keep
        self._stages = tuple(stages)
        self._cancelled = threading.Event()
        self._waited_for = threading.Event()
        self._begun = self._resumed = time.monotonic()
        self._draft: Path | None = None  # of the checkpoint that is being written
        self._own: Future[None]
        self._rest: Future[None] | None = None  # on the first rank
        for thread in threading.enumerate():  # of a `fit` that an error has ended
            if thread.name.startswith(_THREAD):
                thread.join()
        names = [path.name for path in directory.glob("*step-*")]  # some will be put back
        self._known = {name.removeprefix(checkpoint_folder.REPLACED) for name in names}

    def prepare(self) -> None:
        """Makes sure that there is a directory to write to; takes all ranks."""

        def prepare() -> None:
            checkpoint_folder.remove_leftovers(self._directory)
            checkpoint_folder.begin_draft(self._directory, 0, self._known).rmdir()

        self._on_first("", prepare)
        self._memory = memory_of_each_rank(self._ranks, None)

    def write(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Begins to write this rank's tensors, the first rank's state; takes all ranks."""
        self.finish()
        directory, name = self._directory, checkpoint_folder.name_of_step(state["step"])
        begin, step = checkpoint_folder.begin_draft, state["step"]
        draft = Path(self._on_first(name, lambda: str(begin(directory, step, self._known))))
        specs = {
            key: (each.dtype.name, each.shape) if isinstance(each, np.ndarray) else spec_of(each)
            for key, each in own.items()
        }
        tensors = [[key, getattr(own[key], "path", key), *specs[key]] for key in own]
        values: dict[str, Any] = dict(own)
        size = sum(getattr(each, "nbytes", None) or variable_bytes(each) for each in own.values())
        # Without room for the copies that TensorFlow makes of them, training waits for the file.
        if held := size < free_memory(self._memory):
            values = {key: _value(each) for key, each in own.items()}
        self._hurry = draft / _HURRY
        before, self._begun = self._begun, time.monotonic()
        self._time_between, self._resumed = self._begun - before, self._begun
        if held:
            self._waited_for.clear()
        # Its one thread ends by itself when all is done.
        pool = ThreadPoolExecutor(1, _THREAD, _give_way)
        self._own = pool.submit(self._write_own, draft, specs, tensors, values)
        if self._ranks.rank == 0:
            self._rest = pool.submit(self._publish, draft, state, self._own)
        self._draft = draft
        pool.shutdown(wait=False)
        if not held:
            wait([self._own])

    def finish(self) -> None:
        """Waits until the last checkpoint is on the disk; takes all ranks."""
        draft, self._draft = self._draft, None
        self._waited_for.set()
        if draft is None:
            return
        name = draft.stem.removeprefix(checkpoint_folder.DRAFT)
        try:
            self._on_all(name, self._own.result)
            self._on_first(name, lambda: self._rest and self._rest.result())
        except FileError:
            self._cancelled.set()
            if self._rest is not None:
                wait([self._rest])
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def has_failed(self) -> bool:
        """Whether this rank could not write the last checkpoint; never waits."""
        begun = [] if self._draft is None else [self._own, *filter(None, [self._rest])]
        return any(each.done() and each.exception() is not None for each in begun)

    def abandon(self) -> None:
        """Waits a while, for another rank may have ended; takes this rank alone."""
        self._waited_for.set()
        if self._draft is not None:
            with contextlib.suppress(OSError):
                self._hurry.touch()
            until = time.monotonic() + _PATIENCE_SECONDS
            wait([self._rest or self._own], _PATIENCE_SECONDS)
            while self._rest is None and self._draft.exists() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        self._cancelled.set()

    def _write_own(
        self, draft: Path, specs: Any, tensors: list[Any], values: dict[str, Any]
    ) -> None:
        """Writes this rank's file, then the part that tells of it."""
        part = draft / f"rank-{self._ranks.rank:05d}.json"
        found: list[Any] = []
        if specs:
            path = part.with_suffix(".safetensors")
            written = checkpoint_folder.write_tensors(
                path, specs, lambda key: _value(values.pop(key), copy=False), self._pause
            )
            found = [path.name, *written, self._ranks.rank, self._stages, tensors]
        unfinished = part.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found))
        unfinished.rename(part)

    def _pause(self, share: float) -> None:
        """Rests behind each part of a file, unless somebody waits for it.

        Writing takes a twentieth of a core then, and half of the time until the next checkpoint.
        """
        now = time.monotonic()
        due = self._begun + share * self._time_between / 2
        until = now + min(19 * (now - self._resumed), due - now)
        while (left := until - time.monotonic()) > 0 and not self._hurry.exists():
            if self._waited_for.wait(min(left, 10 * _POLL_SECONDS)):
                break
        self._resumed = time.monotonic()

    def _publish(self, draft: Path, state: Mapping[str, Any], own: Future[None]) -> None:
        """Waits for the parts of all ranks, gives the checkpoint its name, removes old ones."""
        parts = [draft / f"rank-{rank:05d}.json" for rank in range(self._ranks.size)]
        if own.exception() is not None:
            return
        while not {part.name for part in parts}.issubset(os.listdir(draft)):
            if self._cancelled.wait(_POLL_SECONDS):
                return
        files: list[SavedFile] = []
        tensors: dict[str, SavedTensor] = {}
        written = (json.loads(part.read_bytes()) for part in parts)
        for file, size, sha256, rank, stages, found in filter(None, written):
            for key, label, dtype, shape in found:
                tensors[key] = SavedTensor(label, dtype, tuple(shape), len(files))
            files.append(SavedFile(file, size, sha256, rank, tuple(stages)))
        for part in (*parts, self._hurry):
            part.unlink(missing_ok=True)
        manifest = Manifest(format=FORMAT, files=tuple(files), tensors=tensors, **state)
        checkpoint_folder.publish(draft, manifest.encode())
        name = checkpoint_folder.name_of_step(manifest.step)
        self._known.add(name)
        try:
            checkpoint_folder.remove_old(self._directory, self._keep, name, self._known)
        except OSError as error:
            logger.warning("could not remove old checkpoints in '%s': %s", self._directory, error)

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


def _give_way() -> None:
    """Has this thread compute only when no other thread wants its core."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _value(given: Any, *, copy: bool = True) -> np.ndarray[Any, Any]:
    if isinstance(given, np.ndarray):
        return given.copy() if copy else given
    return buffer_of(given)  # TensorFlow copies it when the next step changes the variable
