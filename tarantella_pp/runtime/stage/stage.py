"""One stage of the pipeline: compiled for the shapes of its inputs, run forward and backward."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.stage.graph_functions import specs_of
from tarantella_pp.runtime.stage.graph_split import CutError
from tarantella_pp.runtime.stage.split_backward import SplitBackward
from tarantella_pp.runtime.stage.stage_boundary import StageBoundary
from tarantella_pp.runtime.stage.stage_module import StageModule

logger = logging.getLogger(__name__)

Shapes: TypeAlias = tuple[tf.TensorShape, ...]
# Forward and backward of one stage, for micro-batches of one size or of any size.
TrainingPass: TypeAlias = "SplitBackward | TapeBackward"


class TrainingPasses:
    """One pass for the first shapes seen, fast for they are static, and one for all others."""

    def __init__(self, module: StageModule, flops_per_byte: Sequence[float]) -> None:
        self._module = module
        self._flops_per_byte = flops_per_byte
        self._known: dict[Shapes, TrainingPass] = {}
        # The pass for any shape seen so far, and the inputs that it takes.
        self.general: TrainingPass | None = None
        self.specs: list[tf.TensorSpec] = []
        self.fallback: str | None = None  # why the stage could not be cut in three, if so

    def __iter__(self) -> Iterator[TrainingPass]:
        return iter(set(self._known.values()))

    def for_inputs(self, inputs: Sequence[tf.Tensor]) -> TrainingPass:
        """Returns the pass for inputs of these shapes."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._known:
            self._known[shapes] = self._covering(inputs)
        return self._known[shapes]

    def _covering(self, inputs: Sequence[tf.Tensor]) -> TrainingPass:
        if self.general is None:
            self.specs = specs_of(inputs)
            self.general = self._make(self.specs)
        # A size that differs becomes unknown, and stays so: at most one more trace for each.
        pairs = list(zip(self.specs, specs_of(inputs), strict=True))
        if not all(spec.is_compatible_with(given) for spec, given in pairs):
            specs = [spec.most_specific_common_supertype([given]) for spec, given in pairs]
            self.general, self.specs = self._make(specs), specs
        return self.general

    def _make(self, specs: Sequence[tf.TensorSpec]) -> TrainingPass:
        if self.fallback is None:
            try:
                return SplitBackward(self._module, specs, self._flops_per_byte)
            except CutError as error:
                self.fallback = str(error)
                index = self._module.boundary.index
                logger.info("stage %d runs on a gradient tape: %s", index, error)
        return TapeBackward(self._module)


class TapeBackward:
    """Keeps one gradient tape for each micro-batch in flight.

    The tape cannot give the input gradients alone: `backward_input` computes the weight gradients
    along with them, and `backward_weight` only adds them up.
    """

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._tapes: dict[int, tuple[tf.GradientTape, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._waiting: dict[int, Sequence[Any]] = {}
        run = functools.partial(module.run, training=True)
        self._forward = tf.function(run, autograph=False, reduce_retracing=True)

    def forward(self, key: int, inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs micro-batch `key` forward on a tape of its own."""
        sources = self._module.sources(inputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*sources, *self._module.variables])
            outputs, added = self._forward(list(inputs))
        self._tapes[key] = tape, sources, self._module.targets(outputs, added)
        return outputs, added

    def repeat(self, key: int) -> None:
        """Does nothing: a tape keeps all of the forward pass."""

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
        back, of_weights = self._module.parted(sources, gradients)
        self._waiting[key] = [
            (g.values, g.indices, tf.shape(g.indices)) if isinstance(g, tf.IndexedSlices) else g
            for g in of_weights
        ]
        self._module.accumulator.prepare(self._waiting[key])
        return back

    def backward_weight(self, key: int) -> None:
        """Adds the weight gradients of `key` to the sums."""
        gradients = self._waiting.pop(key)
        self._module.accumulator.add_dense(gradients, self._module.accumulator.begin())
        self._module.accumulator.collect(self._module.accumulator.slices_of(gradients))

    def clear(self) -> None:
        """Drops the tapes of micro-batches in flight."""
        self._tapes.clear()
        self._waiting.clear()


class Stage:
    """Runs one stage's nodes forward and backward, one micro-batch at a time.

    The gradients of the stage's trainable weights add up in `module.accumulator`, in the order in
    which the micro-batches run backward.
    """

    def __init__(
        self,
        boundary: StageBoundary,
        calls: Sequence[Call],
        flops_per_byte: Sequence[float] | None = None,
    ) -> None:
        self.boundary = boundary
        self.module = StageModule(boundary, calls)
        self.passes = TrainingPasses(self.module, flops_per_byte or [0.0] * len(calls))
        self._running: dict[int, TrainingPass] = {}
        run = functools.partial(self.module.run, training=False)
        # As in Keras, predictions are traced apart: a layer may be another one by then.
        made = functools.partial(tf.function, run, autograph=False, reduce_retracing=True)
        self._inference = made(), made()

    @property
    def residual_bytes(self) -> int | None:
        """Bytes kept of a micro-batch of the shapes seen first; `None` for loops and on tapes."""
        found = self.passes.general
        return found.residual_bytes if isinstance(found, SplitBackward) else None

    def run_once(self, inputs: Sequence[tf.Tensor], share: float, training: bool) -> None:
        """Runs a micro-batch forward; only what layers write stays."""
        if training:
            self.forward(0, inputs, share)
            self.clear()
        else:
            self.evaluate(inputs, share)

    def forward(
        self, key: int, inputs: Sequence[tf.Tensor], share: float = 1.0
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Runs one micro-batch forward in training mode and keeps what backward needs."""
        work = self._running[key] = self.passes.for_inputs(inputs)
        with self._weighed(share, training=True):
            outputs, added = work.forward(key, inputs)
        return outputs, added if self.module.added_by[True] else None

    def repeat(self, key: int) -> None:
        """Makes again what the backward pass needs and was not kept (action R)."""
        self._running[key].repeat(key)

    def backward(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs one micro-batch backward (action BW)."""
        return self._running.pop(key).backward(key, seeds)

    def backward_input(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the input-gradient part of the backward pass (action B); see `backward`."""
        return self._running[key].backward_input(key, seeds)

    def backward_weight(self, key: int) -> None:
        """Runs the weight-gradient part of the backward pass (action W)."""
        self._running.pop(key).backward_weight(key)

    def evaluate(
        self, inputs: Sequence[tf.Tensor], share: float = 1.0, predicts: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Runs one micro-batch forward in inference mode; takes and returns what `forward` does."""
        with self._weighed(share, training=False):
            outputs, added = self._inference[predicts](list(inputs))
        return outputs, added if self.module.added_by[False] else None

    def reached(self, coming: Sequence[bool]) -> list[bool]:
        """Finds where gradients arrive, and notes which weights they do not reach."""
        sums = self.module.accumulator
        # The usual case costs no trace: gradients come in everywhere and nothing holds them up.
        if all(coming) and not self.module.blocks:
            sums.reached = [True] * len(sums.weights)
            return [True] * len(self.boundary.input_gradients)
        connected, sums.reached = self.module.connected(self.passes.specs, coming)
        return connected

    def clear(self) -> None:
        """Forgets the micro-batches in flight and the gradients so far."""
        self._running.clear()
        for work in self.passes:
            work.clear()
        self.module.accumulator.reset()
        self.module.statistics.clear()

    @contextlib.contextmanager
    def _weighed(self, share: float, training: bool) -> Iterator[None]:
        """Has means of layers' metrics take in no more than the share of the micro-batch."""
        means = self.module.means[training] if share < 1.0 else []
        before = [variable.numpy() for variable in means]
        yield
        for variable, old in zip(means, before, strict=True):
            variable.assign(old + share * (variable.numpy() - old))
