"""Forward and backward of a stage that cannot be cut: a gradient tape around a compiled forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.runtime.modules.stage_module import StageModule


class TapeBackward:
    """Keeps one gradient tape for each micro-batch in flight.

    The tape cannot give the input gradients alone: `backward_input` computes the weight gradients
    along with them, and `backward_weight` only adds them up.
    """

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._tapes: dict[int, tuple[tf.GradientTape, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._waiting: dict[int, list[Any]] = {}
        self._forward = tf.function(self._run, autograph=False, reduce_retracing=True)

    def forward(
        self, key: int, inputs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Runs micro-batch `key` forward on a tape of its own."""
        sources = self._module.sources(inputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*sources, *self._module.variables])
            outputs, added = self._forward(list(inputs))
        self._tapes[key] = tape, sources, self._module.targets(outputs, added)
        return outputs, added if self._module.added_by[True] else None

    def backward(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs `key` backward: accumulates weight gradients, returns the input gradients."""
        gradients = self.backward_input(key, seeds)
        self.backward_weight(key)
        return gradients

    def backward_input(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs `key` backward; the weight gradients wait for `backward_weight`."""
        tape, sources, targets = self._tapes.pop(key)
        wanted = [*sources, *self._module.variables]
        gradients = tape.gradient(targets, wanted, output_gradients=list(seeds))
        self._module.blocks |= any(gradient is None for gradient in gradients[: len(sources)])
        weight_gradients = gradients[len(sources) :]
        self._module.accumulator.prepare(weight_gradients)
        self._waiting[key] = weight_gradients
        return [
            tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)
            for source, gradient in zip(sources, gradients[: len(sources)], strict=True)
        ]

    def backward_weight(self, key: int) -> None:
        """Adds the weight gradients of `key` to the sums."""
        gradients = self._waiting.pop(key)
        self._module.accumulator.add_dense(gradients, self._module.accumulator.begin())
        self._module.accumulator.append_sparse(self._module.accumulator.pairs_of(gradients))

    def clear(self) -> None:
        """Drops what is kept for micro-batches in flight."""
        self._tapes.clear()
        self._waiting.clear()

    def _run(self, inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self._module.run(inputs, training=True)
