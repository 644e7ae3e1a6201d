"""What batch normalizations have seen of a batch, cut into micro-batches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.training import reported_moments


class BatchStatistics:
    """What the batch normalizations of a stage have seen of the batch so far.

        micro-batches      0    1    2    3              number, mean and squares of what was seen
        forward            |    |    |    |   add to        n, m, s
        end of the step                                  moving <- a moving + (1 - a) (m, s / n)

    Each normalizes a micro-batch by itself. But what it keeps for inference takes in the mean and
    variance of the whole batch once a step, as in one process (torchgpipe calls it deferred batch
    normalization: Kim et al., 2020).

    Layers that take in their statistics in another way are left as they are: with `renorm=True`,
    and inside of loops.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tf.Variable] = {}
        self._layers: list[Any] = []
        self._update: Any = None  # compiled once it is known what has been seen

    @contextlib.contextmanager
    def gathered(self, layer: Any) -> Iterator[None]:
        """Has batch normalizations add to what they have seen, where a stage is traced."""
        graph = tf.compat.v1.get_default_graph()
        calls: Counter[int] = Counter()

        def add(part: Any, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> bool:
            # Inside of a loop or a branch: the sums would have to leave its graph.
            if tf.compat.v1.get_default_graph() is not graph:
                return False
            key = id(part), calls[id(part)]
            calls[id(part)] += 1
            if key not in self._seen:
                self._add(key, part, mean.dtype)
            seen = self._seen[key]
            more = tf.stack([tf.fill(tf.shape(mean), count), mean, count * variance])
            seen.assign(_merged(tf.unstack(seen), tf.unstack(more)))
            return True

        with reported_moments(layer, add):
            yield

    @property
    def averages(self) -> list[Any]:
        """The moving averages that are kept here, as far as stages have been traced."""
        return [v for part in self._layers for v in (part.moving_mean, part.moving_variance)]

    @property
    def variables(self) -> list[tf.Variable]:
        """What is kept here of a batch."""
        return list(self._seen.values())

    def merge(self, everywhere: Sequence[np.ndarray[Any, Any]], counts: Sequence[int]) -> None:
        """Puts together what replicas with some micro-batches have seen, given by variable."""
        for seen, parts in zip(self.variables, everywhere, strict=True):
            whole = tf.zeros_like(seen)
            for theirs, count in zip(parts, counts, strict=True):
                if count:
                    whole = _merged(tf.unstack(whole), tf.unstack(tf.constant(theirs)))
            seen.assign(whole)

    def finish(self) -> None:
        """Takes the statistics of the batch in the moving averages, at the end of a step."""
        if not self._seen:
            return
        if self._update is None:
            self._update = tf.function(self._take_in, autograph=False)
        self._update()

    def clear(self) -> None:
        """Forgets what has been seen of a batch whose step does not end."""
        for seen in self._seen.values():
            seen.assign(tf.zeros_like(seen))

    def _add(self, key: tuple[int, int], part: Any, dtype: tf.DType) -> None:
        with tf.init_scope():
            channels = part.moving_mean.shape[0]
            self._seen[key] = tf.Variable(tf.zeros([3, channels], dtype), trainable=False)
        self._layers.append(part)
        self._update = None

    def _take_in(self) -> None:
        for part, seen in zip(self._layers, self._seen.values(), strict=True):
            count, mean, squares = tf.unstack(seen)
            variance = tf.math.divide_no_nan(squares, count)
            for average, value in ((part.moving_mean, mean), (part.moving_variance, variance)):
                old = tf.cast(average.value, value.dtype)
                average.assign(old * part.momentum + value * (1.0 - part.momentum))
            seen.assign(tf.zeros_like(seen))


def _merged(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> tf.Tensor:
    """Number, mean and squared distances from it, of two sets of values together.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    (n, mean, squares), (k, other, more) = first, second
    share = tf.math.divide_no_nan(k, n + k)
    apart = other - mean
    return tf.stack([n + k, mean + apart * share, squares + more + apart * apart * n * share])
