"""Keeps the ranks of a job in step: all stop where one wants to, at one learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tarantella_pp.callbacks.checkpoint import Checkpoint
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import settable_learning_rate
from tarantella_pp.runtime.comm.communicator import Communicator


class Lockstep(keras.callbacks.Callback):
    """Stops all ranks after the same step, and refuses learning rates that differ.

    A rank's clock or a file may tell it alone to stop, and what callbacks set on one rank only is
    not known to the others. So after each step every rank votes: whether it wants to stop, and its
    learning rate. The votes of the step before count, which have come ahead of this step's
    gradients, so that nobody waits. Only ranks that want to stop wait for the votes of this step:
    where all want to they do so at once, and where one does, all do so a step later.

    It is the last of a rank's callbacks, to see what the others have set.
    """

    def __init__(self, communicator: Communicator, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._communicator = communicator
        self._votes: Any = None  # on their way since the last step
        self._late = False  # whether one wanted to stop in the last step before validation

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
        """Counts the votes that training has left."""
        self._late = self._count()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Takes the votes of the last step, which come too late."""
        self._count()

    def on_predict_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Takes the votes of the last step, which come too late."""
        self._count()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether this epoch was the last; all come here together."""
        self._note_preemption()
        late, self._late = self._late or self._count(), False
        wish = late or bool(self.model.stop_training)
        given = self._communicator.allgather_json([wish, settable_learning_rate(self.model)])
        _refuse_other_rates([rate for _, rate in given])
        self.model.stop_training = any(wish for wish, _ in given)

    def _note_preemption(self) -> None:
        """Asks all ranks to stop once this one is to end."""
        if self._checkpoint is not None and self._checkpoint.preempted:
            self.model.stop_training = True

    def _agree(self, name: str) -> None:
        """Sets one of the model's flags to what holds for all ranks."""
        stop = self._count(refuse=True)
        wish = bool(getattr(self.model, name))
        vote = np.array([[wish, settable_learning_rate(self.model)]], np.float64)
        tag = self._communicator.largest_tag // 2 - 1  # not that of a sum of gradients
        self._votes = self._communicator.start_allgather([vote], tag=tag, label="whether to stop")
        if wish and not stop:
            stop = bool(self._votes.wait()[0][:, 0].all())
        setattr(self.model, name, stop)

    def _count(self, refuse: bool = False) -> bool:
        """Whether any rank wanted to stop in the last step, unless that was counted."""
        votes, self._votes = self._votes, None
        if votes is None:
            return False
        wishes, rates = votes.wait()[0].T
        if refuse:
            _refuse_other_rates(rates.tolist())
        return bool(wishes.any())


def _refuse_other_rates(rates: Sequence[float]) -> None:
    for rank, rate in enumerate(rates):
        if not np.array_equal(rate, rates[0], equal_nan=True):
            raise ConfigurationError(
                "All ranks must train at the same learning rate, each its own stages. Received: "
                f"learning_rate={rates[0]:g} on rank 0, learning_rate={rate:g} on rank {rank}. A "
                "callback that sets it must do so on every rank."
            )
