"""What runs a stage forward and backward, by the shapes of its inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.runtime.modules.graph_split import CutError
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.stage.split_backward import SplitBackward

logger = logging.getLogger(__name__)

Shapes: TypeAlias = tuple[tf.TensorShape, ...]
TrainingPass: TypeAlias = "SplitBackward | TapeBackward"
"""Forward and backward of one stage, for micro-batches of one size or of any size."""


class TrainingPasses:
    """One pass for the first shapes seen, fast for they are static, and one for all others.

    Attributes:
        general: The pass for any shape seen so far; `None` before the first.
        specs: What `general` takes.
        fallback: Why the stage could not be cut in three, if so.
    """

    def __init__(self, module: StageModule, repeats: bool) -> None:
        self._module = module
        self._repeats = repeats
        self._known: dict[Shapes, TrainingPass] = {}
        self.general: TrainingPass | None = None
        self.specs: list[tf.TensorSpec] = []
        self.fallback: str | None = None

    def __iter__(self) -> Iterator[TrainingPass]:
        return iter(set(self._known.values()))

    def for_inputs(
        self, inputs: Sequence[tf.Tensor], first: Sequence[tf.TensorSpec]
    ) -> TrainingPass:
        """Returns the pass for inputs of these shapes."""
        shapes = tuple(tensor.shape for tensor in inputs)
        known = self._known.get(shapes)
        if known is None:
            known = self._known[shapes] = self._covering(inputs, first)
        return known

    def _covering(
        self, inputs: Sequence[tf.Tensor], first: Sequence[tf.TensorSpec]
    ) -> TrainingPass:
        if self.general is None:
            self.general, self.specs = self._make(first), list(first)
        pairs = list(zip(self.specs, inputs, strict=True))
        if not all(spec.is_compatible_with(tensor) for spec, tensor in pairs):
            specs = [tf.TensorSpec(_common(s.shape, t.shape), t.dtype) for s, t in pairs]
            self.general, self.specs = self._make(specs), specs
        return self.general

    def _make(self, specs: Sequence[tf.TensorSpec]) -> TrainingPass:
        if self.fallback is None:
            try:
                return SplitBackward(self._module, specs, self._repeats)
            except CutError as error:
                self.fallback = str(error)
                index = self._module.boundary.index
                logger.info("stage %d runs on a gradient tape: %s", index, error)
        return TapeBackward(self._module)


def _common(first: tf.TensorShape, second: tf.TensorShape) -> list[int | None]:
    """The shape that fits both, and any number of rows."""
    sizes = zip(first.as_list(), second.as_list(), strict=True)
    return [a if a == b and place else None for place, (a, b) in enumerate(sizes)]


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
        self._module.accumulator.collect(self._module.accumulator.slices_of(gradients))

    def clear(self) -> None:
        """Drops the tapes of micro-batches in flight."""
        self._tapes.clear()
        self._waiting.clear()

    def _run(self, inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self._module.run(inputs, training=True)
