"""SIGTERM, with which a cluster takes its machines back: noted, and acted upon after a step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from collections.abc import Iterator

import keras

EXIT_CODE = 75
"""EX_TEMPFAIL: start it again; `tarantella` ends so, too, when SIGTERM has stopped a job."""


class Preemption:
    """Whether SIGTERM has asked this rank to end.

    Attributes:
        asked: Whether it has.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes SIGTERM instead of ending at once.

        A second one changes nothing: Slurm sends it to all processes of a job, and the launcher
        passes it on besides. What came too late to be acted upon takes its usual effect afterwards.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: types.FrameType | None) -> None:
            self.asked = True

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
        if self.asked:
            os.kill(os.getpid(), signal.SIGTERM)


class PreemptionVote(keras.callbacks.Callback):
    """Asks all ranks to stop once one of them is to end; stands before `Lockstep`."""

    def __init__(self, preemption: Preemption) -> None:
        super().__init__()
        self._preemption = preemption

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Asks after a step."""
        self._ask()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Asks after an epoch and its validation."""
        self._ask()

    def _ask(self) -> None:
        if self._preemption.asked:
            self.model.stop_training = True
