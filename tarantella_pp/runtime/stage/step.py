"""What a stage and the loop over its actions ask of the step that they run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tarantella_pp.runtime.modules.stage_boundary import BoundaryTensor

if TYPE_CHECKING:
    import tensorflow as tf

    from tarantella_pp.runtime.probes.stage_probe import Pieces


class Step(Protocol):
    """A training, test or prediction step, as stages and the executor see it."""

    training: bool
    pieces: Pieces

    def data(self, stage: int, micro_batch: int) -> Sequence[tf.Tensor]:
        """The model inputs of a stage: one tensor for each of its `model_inputs`."""

    def share(self, micro_batch: int) -> float:
        """The share of a micro-batch in the batch."""

    def scaled(self, factors: tf.Tensor) -> tf.Tensor:
        """Multiplies factors of gradients as those of the loss are."""

    def add(self, losses: tf.Tensor) -> None:
        """Takes what a stage's layers add to the loss of the whole batch."""

    def finish(self, micro_batch: int, results: Sequence[tf.Tensor]) -> None:
        """Takes the model's outputs, on the rank of the last stage."""

    def forwards_done(self) -> None:
        """Learns that this rank has run all its forwards."""

    def update(self, stage: int) -> bool:
        """Updates the weights of a stage whose backward passes are done.

        Called while this rank waits; returns whether there was anything that can be done before
        the step ends.
        """

    def reduce(self, stage: int, bucket: int) -> None:
        """Starts to add up the gradients of a bucket of a stage over the replicas."""

    def progress(self) -> None:
        """Moves on the sums over the replicas that have been started."""

    def run_pending(self) -> bool:
        """Does some of what is to be done with the model's outputs, while this rank waits.

        Returns whether there was any.
        """

    def flush_overdue(self) -> bool:
        """Does what of this must not be left for later; returns whether there was any."""

    def loss_gradients(self, micro_batch: int) -> Mapping[BoundaryTensor, tf.Tensor]:
        """Gradient of the loss with respect to the model's outputs."""
