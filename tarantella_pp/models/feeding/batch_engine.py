"""What Keras' loops need of whatever trains: a pipeline, or replicas of a step of the user's."""

from __future__ import annotations

from typing import Any, Protocol

from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.data_feed import DataFeed
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.tracing.recorder import Recorder


class BatchEngine(Protocol):
    """Trains, tests and predicts one batch after the other, on one rank.

    Attributes:
        communicator: All ranks of the job.
    """

    communicator: Communicator

    @property
    def feed(self) -> DataFeed:
        """Hands every rank its part of each batch."""

    @property
    def prints(self) -> bool:
        """Whether this rank shows progress and writes files."""

    def train(self, batch: Batch) -> dict[str, Any]:
        """Trains one batch; returns Keras' logs."""

    def test(self, batch: Batch) -> dict[str, Any]:
        """Evaluates one batch; returns Keras' logs."""

    def predict(self, batch: Batch) -> Any:
        """Predicts one batch; returns the outputs for all of it."""

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics; all must call it."""

    def record(self, recorder: Recorder | None) -> None:
        """Makes training steps tell when they do what; `None` for no more of that."""
