"""Tries a stage out before it first runs in micro-batches, and tells what its losses count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.probes.added_losses import AddedLosses, not_additive
from tarantella_pp.runtime.probes.coupling_probe import CouplingProbe
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace
from tarantella_pp.runtime.probes.sample_rows import (
    SampleRows,
    is_batched,
    others,
    samples_first,
)
from tarantella_pp.runtime.tf_graph.side_effects import refuse_effects

_ENOUGH = 4
"""Samples to try a stage out with."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a batch is run.

    Attributes:
        sizes: Size of each micro-batch of this replica.
        is_plain: Whether all of the model is one stage of one process.
        total: Number of micro-batches of the batch, of all replicas.
    """

    sizes: tuple[int, ...]
    is_plain: bool
    total: int


class StageProbe:
    """Refuses a stage that would train something else in a pipeline, before any update."""

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._axes = module.boundary.axes_of(tensor.tensor for tensor in module.boundary.inputs)
        self._traces: dict[bool, ProbeTrace] = {}
        self._kinds: dict[bool, Any] = {}
        self._factors: dict[tuple[bool, int, float], tf.Tensor] = {}

    def examine(
        self,
        pieces: Pieces,
        inputs: Sequence[tf.Tensor],
        training: bool,
        following: Callable[[], Iterable[Sequence[tf.Tensor]]],
    ) -> list[tf.Tensor]:
        """Tries the stage out; changes nothing."""
        count = pieces.total
        rows, first = pieces.sizes[0], self._samples_first(inputs)
        trace = self._trace_for(training, rows, first)
        refuse_effects(trace.function, self._module.layer, count, pieces.is_plain)
        for call in trace.drawn_by:
            raise UnsupportedModelError(
                f"'{call.name}' ({type(call.operation).__name__}) draws random numbers of Python "
                "or NumPy when it is traced, so each trace that a pipeline needs would compute "
                "something else. Draw them with keras.random and a SeedGenerator of its own."
            )
        if count > 1:
            samples = self._enough(rows, first, following())
            CouplingProbe(trace, samples).check()
            self._find_kinds(trace, training, samples)
        self._forget(training)
        return trace.outputs(first) if self._module.boundary.sends else []

    def settle(
        self, rows: int, inputs: Sequence[tf.Tensor], added: tf.Tensor, training: bool
    ) -> None:
        """Looks again at losses that were zero when the stage was tried out."""
        kinds = self._kinds.get(training)
        if kinds is None or not np.any(np.isnan(kinds) & (added.numpy() != 0)):
            return
        samples = self._enough(rows, self._samples_first(inputs))
        self._find_kinds(self._traces[training], training, samples)
        unknown = np.flatnonzero(np.isnan(self._kinds[training]) & (added.numpy() != 0))
        if unknown.size:
            raise not_additive(self._module.added_by[training][unknown[0]])
        self._forget(training)

    def factors(self, training: bool, share: float) -> tf.Tensor:
        """What the added losses of a micro-batch count in the loss of the batch."""
        count = len(self._module.added_by[training])
        key = training, count, share
        if key not in self._factors:  # made once, for each micro-batch of each step asks for it
            kinds = np.nan_to_num(self._kinds.get(training, np.zeros(count)))
            self._factors[key] = tf.constant(np.maximum(kinds, share), keras.config.floatx())
        return self._factors[key]

    def _find_kinds(self, trace: ProbeTrace, training: bool, samples: SampleRows) -> None:
        self._factors.clear()
        if self._module.added_by[training]:
            self._kinds[training] = AddedLosses(trace, samples).kinds()

    def _forget(self, training: bool) -> None:
        """Drops a trace that has told all."""
        if not np.isnan(self._kinds.get(training, 0.0)).any():
            del self._traces[training]

    def _trace_for(self, training: bool, rows: int, inputs: Sequence[tf.Tensor]) -> ProbeTrace:
        if training not in self._traces:
            specs = [
                tf.TensorSpec([None, *x.shape[1:]] if one else x.shape, x.dtype)
                for x, one in zip(inputs, self._batched(rows, inputs), strict=True)
            ]
            self._traces[training] = ProbeTrace(self._module, specs, training)
        return self._traces[training]

    def _batched(self, rows: int, inputs: Sequence[tf.Tensor]) -> list[bool]:
        """For each input whether it has rows of samples."""
        pairs = zip(inputs, self._axes, strict=True)
        return [axis is not None and is_batched(x, rows) for x, axis in pairs]

    def _samples_first(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return samples_first(inputs, self._axes)

    def _enough(
        self, rows: int, inputs: Sequence[tf.Tensor], following: Iterable[Sequence[tf.Tensor]] = ()
    ) -> SampleRows:
        """Puts others beside samples that are too few to see which of them are mixed."""
        found = list(inputs)
        batched = self._batched(rows, inputs)
        size = rows
        for more in following:
            if size >= _ENOUGH or len(more) != len(found):
                break
            size += next(y.shape[0] * rows // x.shape[0] for x, y in zip(inputs, more, strict=True))
            found = [tf.concat([x, y], 0) for x, y in zip(found, more, strict=True)]
        while size < _ENOUGH:
            found = [
                tf.concat([x, x if size > 1 else others(x, 1)], 0) if one else x
                for x, one in zip(found, batched, strict=True)
            ]
            size *= 2
        return SampleRows(size, found, batched)
