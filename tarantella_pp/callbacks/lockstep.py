"""Keeps the ranks of a job in step: all stop where one wants to, at one learning rate."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import settable_learning_rate
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

_FIRST_TAG, _TAGS = 64, 256
_FLOAT = np.dtype(np.float64)


class _Vote(NamedTuple):
    """What a rank says after a step."""

    call: float  # number of the call that the step belongs to
    step: float  # number of the step in it
    stop: float  # whether the rank wants to stop
    rate: float  # its learning rate; NaN where a schedule sets it


class _Decision(NamedTuple):
    """What the first rank makes of all votes."""

    call: float  # number of the call that the step belongs to
    step: float  # number of the step in it
    stop: float  # whether all ranks stop
    odd: float = -1.0  # A rank with another learning rate than the first one; -1 for none
    rate: float = 0.0  # the learning rate there
    first: float = 0.0  # the first rank's


class Lockstep(keras.callbacks.Callback):
    """Stops all ranks after the same step, and refuses learning rates that differ.

    A rank's clock or a file may tell it alone to stop, and what callbacks set on one rank only is
    not known to the others. So after each step every rank sends the first one its vote, and takes
    that one's decision. The first rank waits for nobody: it counts its own vote of this step, and
    of the others' the votes of the step before, which have come ahead of that step's gradients. So
    where all ranks want to stop they do so at once, and where one does, all do so a step later.

    It is the last of a rank's callbacks, to see what the others have set.
    """

    def __init__(self, communicator: Communicator, preemption: Preemption | None = None) -> None:
        super().__init__()
        self._preemption = preemption
        self._communicator = communicator
        self._call = communicator.call_number
        # Of its own: a callback that evaluates must not take the votes of the `fit` around it.
        self._tag = _FIRST_TAG + self._call % _TAGS
        self._step = 0
        self._awaited = False
        self._rate = math.nan
        self._wishes: set[str] = set()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop training."""
        self._note_preemption()
        self._agree("stop_training")

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop evaluating."""
        self._agree("stop_evaluating")

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop predicting."""
        self._agree("stop_predicting")

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Takes the votes that training has left."""
        self._take_votes()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether this epoch was the last; all come here together."""
        self._note_preemption()
        self._take_votes()
        wish = self.model.stop_training or "stop_training" in self._wishes
        given = self._communicator.allgather_json([wish, settable_learning_rate(self.model)])
        rates = [rate for _, rate in given]
        for rank, rate in enumerate(rates):
            if _differ(rates[0], rate):
                raise _refusal(rates[0], rank, rate)
        self.model.stop_training = any(wish for wish, _ in given)

    def _note_preemption(self) -> None:
        """Asks all ranks to stop once this one is to end."""
        if self._preemption is not None and self._preemption.asked:
            self.model.stop_training = True

    def _agree(self, name: str) -> None:
        """Sets one of the model's flags to what holds for all ranks."""
        wish = bool(getattr(self.model, name))
        vote = _Vote(self._call, self._step, wish, settable_learning_rate(self.model))
        if self._communicator.rank == 0:
            decision = self._decide(vote)
            for rank in range(1, self._communicator.size):
                self._send(decision, rank)
        else:
            self._send(vote, 0)
            decision = _Decision(*self._receive(0, len(_Decision._fields)))
        self._step += 1
        if decision.odd >= 0:
            raise _refusal(decision.first, int(decision.odd), decision.rate)
        if wish and not decision.stop:
            self._wishes.add(name)
        setattr(self.model, name, bool(decision.stop))

    def _decide(self, mine: _Vote) -> _Decision:
        votes = self._take_votes()
        self._awaited = True
        before, self._rate = self._rate, mine.rate
        stop = mine.stop or any(vote.stop for vote in votes)
        for rank, vote in enumerate(votes, 1):
            if _differ(before, vote.rate):
                return _Decision(mine.call, mine.step, stop, rank, vote.rate, before)
        return _Decision(mine.call, mine.step, stop)

    def _take_votes(self) -> list[_Vote]:
        """The other ranks' votes of the last step, on the first rank; none if they were taken."""
        if not self._awaited:
            return []
        self._awaited = False
        return [
            _Vote(*self._receive(rank, len(_Vote._fields), self._step - 1))
            for rank in range(1, self._communicator.size)
        ]

    def _send(self, values: tuple[float, ...], rank: int) -> None:
        self._communicator.send(
            [np.array(values, _FLOAT)], rank, self._tag, label="whether to stop"
        )

    def _receive(self, rank: int, size: int, step: int | None = None) -> list[float]:
        """Receives a step's values; drops older ones, left by calls that an error ended."""
        spec = [TensorSpec((size,), _FLOAT)]
        about = [self._call, self._step if step is None else step]
        while True:
            request = self._communicator.post_receive(
                spec, rank, self._tag, label="whether to stop"
            )
            values: list[float] = request.wait()[0].tolist()
            if values[:2] == about:
                return values


def _differ(one: float, other: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other))


def _refusal(first: float, rank: int, rate: float) -> ConfigurationError:
    return ConfigurationError(
        "All ranks must train at the same learning rate, each its own stages. Received: "
        f"learning_rate={first:g} on rank 0, learning_rate={rate:g} on rank {rank}. A callback "
        "that sets it must do so on every rank."
    )


# EX_TEMPFAIL: start it again; `tarantella` ends so, too, when SIGTERM has stopped a job.
EXIT_CODE = 75


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
