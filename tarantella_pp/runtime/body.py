"""What a stage computes with: its nodes and the sums of its weights' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.partition.draft import Call
from tarantella_pp.runtime.gradient_sums import GradientSums
from tarantella_pp.runtime.layout import StageLayout
from tarantella_pp.runtime.runner import StageLayer


class StageBody:
    """The nodes of one stage, and one gradient sum for each of its trainable weights.

    Args:
        layout: The border of the stage.
        calls: The stage's calls, in topological order.
        micro_batches: Most micro-batches of a step.

    Attributes:
        added_by: Names of the layers that add losses, in training and otherwise; known once it
            has run.
        blocks: Whether some input gets no gradient although it could; set by the passes.
    """

    def __init__(self, layout: StageLayout, calls: Sequence[Call], micro_batches: int = 1) -> None:
        self.layout = layout
        self.layer = StageLayer(calls, layout)
        self.sums = GradientSums(self.layer.trainable_variables, micro_batches)
        self.added_by: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        self.blocks = False

    @property
    def variables(self) -> list[Any]:
        """TensorFlow's variables of the trainable weights, to differentiate by."""
        return [weight.value for weight in self.sums.weights]

    def run(self, inputs: Sequence[tf.Tensor], training: bool) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs the nodes on one micro-batch.

        Args:
            inputs: One tensor for each port of `layout.inputs`.
            training: Whether layers run in training mode.

        Returns:
            One tensor for each port of `layout.outputs`, and the losses that the layers added,
            as one tensor in Keras' default float type.
        """
        outputs, losses = self.layer(inputs, training=training)
        dtype = keras.config.floatx()
        self.added_by[training] = tuple(name for name, _ in losses)
        added = [tf.cast(tf.reduce_sum(loss), dtype) for _, loss in losses]
        return outputs, tf.stack(added) if added else tf.zeros([0], dtype)

    def sources(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Those of `inputs` whose gradient the stage sends back."""
        ports = dict(zip(self.layout.inputs, inputs, strict=True))
        return [ports[port] for port in self.layout.input_gradients]

    def targets(self, outputs: Sequence[tf.Tensor], added: tf.Tensor) -> list[tf.Tensor]:
        """What is differentiated: the added losses, then each output that a gradient reaches."""
        ports = dict(zip(self.layout.outputs, outputs, strict=True))
        return [added, *(ports[port] for port in self.layout.seeded)]

    def connected(
        self, specs: Sequence[tf.TensorSpec], coming: Sequence[bool]
    ) -> tuple[list[bool], list[bool]]:
        """Finds out where gradients get to; runs nothing.

        Args:
            specs: Shape and dtype of each input.
            coming: For each of `layout.seeded` whether a gradient comes in there.

        Returns:
            For each of `layout.input_gradients`, and for each trainable weight, whether a
            gradient reaches it.
        """
        found: list[bool] = []

        def trace(*inputs: tf.Tensor) -> None:
            wanted = [*self.sources(inputs), *self.variables]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(wanted)
                targets = self.targets(*self.run(inputs, training=True))
                kept = [t for t, comes in zip(targets, [True, *coming], strict=True) if comes]
            found.extend(gradient is not None for gradient in tape.gradient(kept, wanted))

        tf.function(trace, input_signature=list(specs), autograph=False).get_concrete_function()
        inputs = len(self.layout.input_gradients)
        return found[:inputs], found[inputs:]
