"""Whether a stage treats each sample of a batch by itself, found by trying.

    samples        0   1   2   3             0   1   2   3
    inputs         a   b   c   d             a   b'  c   d'      b', d' are others
                   |   |   |   |     and     |   |   |   |
    outputs        A   B   C   D             A   ?   C   ?       must stay A and C

The same must hold for the gradients of a loss that looks at samples 0 and 2 only, and with the
other half replaced. What mixes samples would train something else in micro-batches. So would what
follows from the number of samples, or from the place of a sample among them: half of them alone
must give the same, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace, Trial
from tarantella_pp.runtime.probes.sample_rows import (
    Change,
    SampleRows,
    neighbours,
    others,
    rows_of,
)

Array = NDArray[Any]

_OTHER_SHAPES = 100
"""How much farther apart results may be that were computed of tensors of other shapes."""


class CouplingProbe:
    """Tries a stage out on the rows of one micro-batch."""

    def __init__(self, trace: ProbeTrace, samples: SampleRows) -> None:
        self._trace = trace
        self._tolerance = trace.tolerance
        self._samples = samples

    def check(self) -> None:
        """Refuses a stage that mixes samples; the losses that layers add have another probe."""
        for kept, change in self._sides():
            before, after = self._tried(kept, change)
            weights = self._other_weights(before, after)
            if weights or not self._equal_rows(before, after, kept):
                raise self._refusal(weights)
        for part in self._parts():
            if not self._equal_alone(part, before):
                raise self._counting(part)

    def _sides(self) -> list[tuple[Array, Change]]:
        """Which samples are kept, and how the others are replaced."""
        kept = np.arange(self._samples.rows) % 2 == 0
        return [(kept, neighbours), (~kept, others)]

    def _tried(self, kept: Array, change: Change) -> tuple[Trial, Trial]:
        factors = np.zeros(len(self._trace.added_by))
        before = self._trace(kept, factors, self._samples.inputs)
        try:
            return before, self._trace(kept, factors, self._samples.mixed(kept, change))
        except tf.errors.OpError:  # made-up content that a layer does not take
            return before, self._trace(kept, factors, self._samples.mixed(kept, neighbours))

    def _equal_rows(self, before: Trial, after: Trial, kept: Array) -> bool:
        """Whether outputs and gradients of inputs are the same for the kept samples."""
        first = [*before.outputs, *before.input_gradients]
        second = [*after.outputs, *after.input_gradients]
        trials = zip(first, second, self._trace.results_batched, strict=False)
        return all(self._equal(a, b, kept, one) for a, b, one in trials)

    def _other_weights(self, before: Trial, after: Trial) -> list[Any]:
        """The weights whose gradient is another; what is not finite tells nothing."""
        changed = []
        for weight, a, b in zip(
            self._trace.weights, before.weight_gradients, after.weight_gradients, strict=True
        ):
            limit = self._tolerance * max(a[1], b[1])
            if np.isfinite([*a, *b]).all() and abs(a[0] - b[0]) > limit:
                changed.append(weight)
        return changed

    def _first_call(self) -> Any:
        """The first call whose result for one sample changes with other samples, if any does."""
        for kept, change in self._sides():
            before = self._trace.results(self._samples.inputs, kept)
            try:
                after = self._trace.results(self._samples.mixed(kept, change), kept)
            except tf.errors.OpError:
                continue
            for call, first, second in zip(self._trace.calls, before, after, strict=True):
                trials = zip(first, second, self._trace.batched_of(call), strict=True)
                if not all(self._equal(a, b, kept, one) for a, b, one in trials):
                    return call
        return None

    def _parts(self) -> list[Array]:
        """Samples to run alone; none where they would get other random numbers."""
        first = np.arange(self._samples.rows) < self._samples.rows // 2
        return [] if self._trace.is_random else [first, ~first]

    def _equal_alone(self, part: Array, whole: Trial) -> bool:
        """Whether the stage makes the same of some samples if there are no others."""
        factors, every = np.zeros(len(self._trace.added_by)), np.ones(part.sum(), bool)
        alone = self._trace(every, factors, self._samples.only(part))
        trials = zip(whole.outputs, alone.outputs, self._trace.results_batched, strict=False)
        return all(self._close(rows_of(a, part) if one else a, b) for a, b, one in trials)

    def _close(self, whole: Array, alone: Array) -> bool:
        """Whether results are the same but for the rounding of other shapes."""
        if whole.shape != alone.shape or whole.dtype.kind != "f":
            return whole.shape != alone.shape or bool(np.array_equal(whole, alone))
        largest = np.max(np.abs(whole), where=np.isfinite(whole), initial=0.0)
        limit = min(_OTHER_SHAPES * self._tolerance, 0.25) * largest
        return bool(np.allclose(whole, alone, rtol=0.0, atol=limit, equal_nan=True))

    def _counting(self, part: Array) -> UnsupportedModelError:
        whole = self._trace.results(self._samples.inputs, np.ones(self._samples.rows, bool))
        alone = self._trace.results(self._samples.only(part), np.ones(part.sum(), bool))
        what = "One of the layers"
        for call, first, second in zip(self._trace.calls, whole, alone, strict=True):
            trials = zip(first, second, self._trace.batched_of(call), strict=True)
            floats = ((a, b, one) for a, b, one in trials if a.dtype.kind == "f")
            if not all(self._close(rows_of(a, part) if one else a, b) for a, b, one in floats):
                what = f"'{call.name}' ({type(call.operation).__name__})"
                break
        return UnsupportedModelError(
            f"{what} looks at the number of samples or at the place of a sample among them: its "
            "result for some samples changes when they are alone, so in micro-batches it would "
            "train something else than in one process. Use num_micro_batches=1 and num_replicas=1, "
            "or a form of it that treats each sample by itself."
        )

    def _equal(self, before: Array, after: Array, kept: Array, batched: bool) -> bool:
        """Whether the rows of kept samples are the same; of tensors without samples, all rows."""
        if before.shape != after.shape:
            return False
        if batched:
            before, after = rows_of(before, kept), rows_of(after, kept)
        if before.dtype.kind != "f":
            return bool(np.array_equal(before, after))
        largest = np.max(np.abs(before), where=np.isfinite(before), initial=0.0)
        limit = self._tolerance * largest
        return bool(np.allclose(before, after, rtol=0.0, atol=limit, equal_nan=True))

    def _refusal(self, weights: Sequence[Any]) -> UnsupportedModelError:
        call = self._first_call()
        what, how = "One of the layers", "its gradient"
        if call is not None:
            what, how = f"'{call.name}' ({type(call.operation).__name__})", "its result"
        elif weights:
            what = f"The layer of weight '{weights[0].path}'"
        return UnsupportedModelError(
            f"{what} mixes samples: {how} for one sample of a batch changes when other samples do, "
            "so in micro-batches it would train something else than in one process. Use "
            "num_micro_batches=1 and num_replicas=1, or a form of it that treats each sample by "
            "itself, with the samples along the first dimension."
        )
