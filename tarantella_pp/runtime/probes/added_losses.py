"""What the losses that layers add count in the loss of a batch: sums and means over samples.

    loss of samples a, b and of a', b  differ by  d
    loss of a, b, c, e and of a', b, c, e  differ by  d    if it is a sum over samples
                                                      d/2  if it is a mean
                                                      anything else if it mixes them

The first rows of random numbers are the same for more rows, so this holds with random layers, too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace, Trial
from tarantella_pp.runtime.probes.sample_rows import (
    Change,
    SampleRows,
    negative,
    neighbours,
    others,
)

Array = NDArray[Any]


class AddedLosses:
    """Finds out how the losses that a stage's layers add follow from the samples."""

    def __init__(self, trace: ProbeTrace, samples: SampleRows) -> None:
        self._trace = trace
        self._tolerance = 3 * trace.tolerance  # sums over more rows are added up in another order
        self._samples = samples
        self._names = trace.added_by
        self._runs: list[list[tf.Tensor]] = []

    def kinds(self) -> Array:
        """Tells sums from means."""
        count = len(self._names)
        try:
            found = self._shown(others)
        except tf.errors.OpError:  # made-up content that a layer does not take
            found = self._shown(neighbours)
        runs = self._runs
        with contextlib.suppress(tf.errors.OpError):
            again = self._shown(negative)
            for name, first, second in zip(self._names, found, again, strict=True):
                if abs(first - second) == 1:
                    raise not_additive(name)
            found = np.where(np.isnan(found), again, found)
        self._runs = runs
        for place in np.flatnonzero(np.isnan(found)):
            found[place] = self._kind_of_gradients(np.eye(count)[place], self._names[place])
        for kind in (0.0, 1.0):  # what does not show in the values may show in the gradients
            factors = np.where(found == kind, 1 + np.arange(count) / 7, 0.0)
            names = [n for n, one in zip(self._names, found, strict=True) if one == kind]
            if names:
                shown = self._kind_of_gradients(factors, names[0])
                if shown == 1 - kind:
                    raise not_additive(names[0])
        return found

    def _shown(self, change: Change) -> Array:
        """The kinds as the values show them when samples are changed like this."""
        self._runs = self._variations(change)
        values = np.stack([trial.added for trial in self._try(np.zeros(len(self._names)))], -1)
        return np.array([self._kind(*pair) for pair in zip(values, self._names, strict=True)])

    def _variations(self, change: Change) -> list[list[tf.Tensor]]:
        """The samples, half of them replaced, and both with as many other samples."""
        samples = self._samples
        parts = [samples.inputs, samples.mixed(np.arange(samples.rows) % 2 == 0, change)]
        return [*parts, *(samples.beside(part, change) for part in parts)]

    def _try(self, factors: Array) -> list[Trial]:
        none = [np.zeros(times * self._samples.rows, bool) for times in (1, 1, 2, 2)]
        pairs = zip(none, self._runs, strict=True)
        return [self._trace(kept, factors, inputs) for kept, inputs in pairs]

    def _kind_of_gradients(self, factors: Array, name: str) -> float:
        """The kind of a sum of losses by its gradients; not a number if they are zero."""
        trials = [trial.weight_gradients for trial in self._try(factors)]
        if not len(trials[0]):
            return np.nan
        products = np.stack([trial[:, 0] for trial in trials], -1)
        lengths = np.stack([trial[:, 1] for trial in trials], -1).max(-1)
        kinds = {self._kind(row, name, size) for row, size in zip(products, lengths, strict=True)}
        kinds = {kind for kind in kinds if not np.isnan(kind)}
        if len(kinds) > 1:
            raise not_additive(name)
        return kinds.pop() if kinds else np.nan

    def _kind(self, values: Array, name: str, size: float | None = None) -> float:
        if not np.isfinite(values).all():
            return np.nan
        limit = self._tolerance * (np.abs(values).max() if size is None else size)
        short, long = values[0] - values[1], values[2] - values[3]
        is_sum, is_mean = abs(long - short) <= limit, abs(2 * long - short) <= 2 * limit
        if is_sum and is_mean:  # the same for other samples: what matters is their number
            is_sum = abs(values[2] - 2 * values[0]) <= limit
            is_mean = abs(values[2] - values[0]) <= limit
            return np.nan if is_sum == is_mean else float(is_sum)
        if not is_sum and not is_mean:
            raise not_additive(name)
        return float(is_sum)


def not_additive(name: str) -> UnsupportedModelError:
    """The error of a loss that micro-batches cannot add up."""
    return UnsupportedModelError(
        f"Layer '{name}' adds a loss that is not to be recognized as a sum or a mean over the "
        "samples of the batch: what it is for some of them depends on others. In micro-batches it "
        "would train something else than in one process. Use num_micro_batches=1 and "
        "num_replicas=1, or add ops.sum or ops.mean of one value for each sample."
    )
