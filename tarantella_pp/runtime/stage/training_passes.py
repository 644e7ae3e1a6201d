"""What runs a stage forward and backward, by the shapes of its inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import tensorflow as tf

from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.stage.split_backward import SplitBackward
from tarantella_pp.runtime.stage.tape_backward import TapeBackward
from tarantella_pp.runtime.tf_graph.graph_split import CutError

logger = logging.getLogger(__name__)

Shapes = tuple[tf.TensorShape, ...]


class TrainingPass(Protocol):
    """Forward and backward of one stage, for micro-batches of one size or of any size."""

    def forward(
        self, key: int, inputs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Runs micro-batch `key` forward: the outputs, and the added losses."""

    def backward(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs `key` backward: accumulates weight gradients, returns the input gradients."""

    def backward_input(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The part of `backward` that the input gradients need."""

    def backward_weight(self, key: int) -> None:
        """The rest of `backward`."""

    def clear(self) -> None:
        """Drops what is kept for micro-batches in flight."""


class TrainingPasses:
    """One pass for the first shapes seen, fast for they are static, and one for all others.

    Attributes:
        general: The pass for any shape seen so far; `None` before the first.
        specs: What `general` takes.
        fallback: Why the stage could not be cut in three, if so.
    """

    def __init__(self, module: StageModule, recompute: bool) -> None:
        self._module = module
        self._recompute = recompute
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
                return SplitBackward(self._module, specs, self._recompute)
            except CutError as error:
                self.fallback = str(error)
                index = self._module.boundary.index
                logger.info("stage %d runs on a gradient tape: %s", index, error)
        return TapeBackward(self._module)


def _common(first: tf.TensorShape, second: tf.TensorShape) -> list[int | None]:
    """The shape that fits both, and any number of rows."""
    sizes = zip(first.as_list(), second.as_list(), strict=True)
    return [a if a == b and place else None for place, (a, b) in enumerate(sizes)]
