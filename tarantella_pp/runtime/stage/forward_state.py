"""What forward passes write - seeds, statistics, metrics - as if one pipeline had run them all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.internals.training import batch_norms, reported_moments, running_states
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.comm.process_groups import ReplicaExchange
from tarantella_pp.runtime.comm.tensor_buffers import value_of, values_kept
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction


class BatchStatistics:
    """What the batch normalizations of a stage have seen of the batch so far.

        micro-batches      0    1    2    3              number, mean and squares of what was seen
        forward            |    |    |    |   add to        n, m, s
        end of the step                                  moving <- a moving + (1 - a) (m, s / n)

    Each normalizes a micro-batch by itself. But what it keeps for inference takes in the mean and
    variance of the whole batch once a step, as in one process (torchgpipe calls it deferred batch
    normalization: Kim et al., 2020).

    Layers that take in their statistics in another way are left as they are: with `renorm=True`,
    and inside of loops. So are all where something reads the new averages, of the one micro-batch.
    """

    def __init__(self, layer: Any) -> None:
        self.waits = True  # for the end of the step
        # Made before anything is traced: TensorFlow traces twice what makes variables.
        self._unused = {
            id(part): _nothing_seen(
                part, tf.as_dtype(keras.backend.result_type(part.compute_dtype, "float32"))
            )
            for part in batch_norms(layer)
            if part.built
        }
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
            if not self.waits or tf.compat.v1.get_default_graph() is not graph:
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
            self._update = CompiledFunction(self._take_in, [])
        self._update()

    def clear(self) -> None:
        """Forgets what has been seen of a batch whose step does not end."""
        for seen in self._seen.values():
            seen.assign(tf.zeros_like(seen))

    def _add(self, key: tuple[int, int], part: Any, dtype: tf.DType) -> None:
        seen = self._unused.pop(id(part), None)
        if seen is None or seen.dtype != dtype:  # it is called again, or with other numbers
            seen = _nothing_seen(part, dtype)
        self._seen[key] = seen
        self._layers.append(part)
        self._update = None

    def _take_in(self) -> None:
        for part, seen in zip(self._layers, self._seen.values(), strict=True):
            count, mean, squares = tf.unstack(seen)
            variance = tf.math.divide_no_nan(squares, count)
            for average, value in ((part.moving_mean, mean), (part.moving_variance, variance)):
                old = tf.cast(average.value, value.dtype)
                new = old * part.momentum + value * (1.0 - part.momentum)
                average.assign(tf.where(count > 0, new, old))
            seen.assign(tf.zeros_like(seen))


def _nothing_seen(part: Any, dtype: tf.DType) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(tf.zeros([3, part.moving_mean.shape[0]], dtype), trainable=False)


def _merged(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> tf.Tensor:
    """Number, mean and squared distances from it, of two sets of values together.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    (n, mean, squares), (k, other, more) = first, second
    share = tf.math.divide_no_nan(k, n + k)
    apart = other - mean
    return tf.stack([n + k, mean + apart * share, squares + more + apart * apart * n * share])


class ForwardState:
    """Lets replicas go on where the one before ends, and agree on the state after a step.

    Seeds count what has been drawn. So a replica begins with the count that the micro-batches of
    the replicas before it lead to, and after the step all have the last replica's. Moving
    averages take in the statistics of the whole batch; see `BatchStatistics`. Where layers take in
    one micro-batch after the other, all replicas get the mean of theirs. Metrics of layers add up,
    as those of the model do.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        statistics: Sequence[BatchStatistics],
        exchange: ReplicaExchange,
    ) -> None:
        self._exchange = exchange
        self._of_batch = statistics
        self._averages: dict[int, Any] = {}
        seeds: dict[int, Any] = {}
        shared = calls if exchange.peers.size > 1 else ()
        for operation in (call.operation for call in shared):
            for part in batch_norms(operation):
                self._averages |= {id(v): v for v in part.non_trainable_variables}
            seeds |= {id(state): state for state in running_states(operation)}
        metrics = [metric for call in shared for metric in layer_metrics(call.operation)]
        found = {id(v): v for metric in metrics for v in metric.variables}
        self._metrics = list(found.values())
        # What is neither an average nor a metric counts draws of random numbers.
        known = {*self._averages, *found}
        self._seeds = [v for key, v in seeds.items() if key not in known]
        self._drawn: dict[bool, list[np.ndarray[Any, Any]]] = {}
        self._before: list[np.ndarray[Any, Any]] = []  # of the seeds

    @contextlib.contextmanager
    def measuring(self, training: bool) -> Iterator[bool]:
        """Learns what one micro-batch draws, which runs inside if that is yet unknown."""
        if not self._seeds or training in self._drawn:
            yield False
            return
        variables = [*self._seeds, *self._averages.values(), *self._metrics]
        with values_kept(variables) as before:
            yield True
            pairs = zip(self._seeds, before, strict=False)
            self._drawn[training] = [value_of(seed) - start for seed, start in pairs]

    def begin(self, first: int, training: bool) -> None:
        """Sets seeds to where the micro-batches before this replica's first one leave them."""
        self._before = [value_of(seed) for seed in self._seeds]
        self._set_seeds(first, training)
        self._exchange.begin_metrics(self._metrics)

    def end(self, counts: Sequence[int], training: bool) -> None:
        """Gives all replicas the state after the whole batch, given their micro-batches."""
        self._set_seeds(sum(counts), training)
        if not counts[self._exchange.peers.rank]:  # it has run one nevertheless
            self._exchange.begin_metrics(self._metrics)
        self._exchange.merge_metrics(self._metrics)
        if training:
            for statistics in self._of_batch:
                if len(counts) > 1:
                    everywhere = self._exchange.values_of_all(statistics.variables)
                    statistics.merge(everywhere, counts)
                statistics.finish()
            self._average(counts)

    def _set_seeds(self, number: int, training: bool) -> None:
        """Sets seeds to where some number of micro-batches leave them."""
        drawn = self._drawn.get(training, ())
        for seed, start, each in zip(self._seeds, self._before, drawn, strict=False):
            seed.assign(start + each * np.asarray(number, start.dtype))

    def _average(self, counts: Sequence[int]) -> None:
        """Averages what takes in one micro-batch after the other, as far as stages are traced."""
        of_batch = {id(v) for statistics in self._of_batch for v in statistics.averages}
        variables = [v for key, v in self._averages.items() if key not in of_batch]
        everywhere = self._exchange.values_of_all(variables)
        for variable, values in zip(variables, everywhere, strict=True):
            theirs = values[np.asarray(counts) > 0]  # a spare replica has run one nevertheless
            # Those that do not change, of frozen layers, keep their bits.
            variable.assign(theirs[0] + (theirs - theirs[0]).mean(axis=0).astype(values.dtype))
