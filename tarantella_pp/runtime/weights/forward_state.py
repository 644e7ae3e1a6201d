"""What forward passes write - seeds, statistics, metrics - as if one pipeline had run them all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import layer_metrics, sublayers
from tarantella_pp.internals.training import reported_moments, running_states
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.weights.process_groups import BatchShare

Array = np.ndarray[Any, Any]


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

    def merge(self, peers: Communicator, counts: Sequence[int]) -> None:
        """Puts together what all replicas have seen."""
        for seen, parts in _of_all(peers, self.variables):
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


def _of_all(peers: Communicator, variables: Sequence[Any]) -> list[tuple[Any, Array]]:
    """Gathers each variable's value on every replica; all values travel at once."""
    label = "state of forward passes"
    requests = [peers.start_allgather([value_of(v)[None]], label=label) for v in variables]
    return [(v, request.wait()[0]) for v, request in zip(variables, requests, strict=True)]


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
    averages take in the statistics of the whole batch; see `BatchStatistics`. Some take in one
    micro-batch after the other, `v <- a v + (1 - a) x`. What all the micro-batches of a replica
    make of them is of the same form, so the replicas' are put one after the other. Metrics of
    layers get the sum of what the replicas add to them.
    """

    def __init__(
        self, calls: Sequence[Call], statistics: Sequence[BatchStatistics], peers: Communicator
    ) -> None:
        self._peers = peers
        self._of_batch = statistics
        self._statistics: dict[int, tuple[Any, float]] = {}
        seeds: dict[int, Any] = {}
        operations = [call.operation for call in calls if isinstance(call.operation, keras.Layer)]
        for layer in {id(layer): layer for layer in operations}.values() if peers.size > 1 else ():
            times = sum(each is layer for each in operations)
            for part in sublayers(layer):
                if isinstance(part, keras.layers.BatchNormalization):
                    for variable in part.non_trainable_variables:
                        self._statistics[id(variable)] = variable, part.momentum**times
            seeds.update({id(state): state for state in running_states(layer)})
        metrics = [m for call in calls for m in layer_metrics(call.operation)]
        variables = [v for metric in metrics for v in metric.variables] if peers.size > 1 else []
        self._metrics = {id(v): v for v in variables}
        # What is neither an average nor a metric counts draws of random numbers.
        known = {*self._statistics, *self._metrics}
        self._seeds = [v for key, v in seeds.items() if key not in known]
        self._drawn: dict[bool, list[Array]] = {}
        self._before: dict[int, Array] = {}

    def must_measure(self, training: bool) -> bool:
        """Whether it is yet to be found out how much a micro-batch draws."""
        return bool(self._seeds) and training not in self._drawn

    def snapshot(self) -> list[Array]:
        """The state by now."""
        return [value_of(variable) for variable in self._variables]

    def restore(self, state: Sequence[Array]) -> None:
        """Brings a state back."""
        for variable, value in zip(self._variables, state, strict=True):
            variable.assign(value)

    def measured(self, before: Sequence[Array], training: bool) -> None:
        """Learns what one micro-batch draws."""
        pairs = zip(self._seeds, before, strict=False)
        self._drawn[training] = [value_of(seed) - start for seed, start in pairs]

    def begin(self, share: BatchShare, training: bool) -> None:
        """Sets seeds to where the replicas before this one leave them."""
        kept = [*self._seeds, *self._metrics.values()]
        if training:
            kept += [variable for variable, _ in self._in_turn]
        self._before = {id(variable): value_of(variable) for variable in kept}
        for seed, number in zip(self._seeds, self._drawn.get(training, ()), strict=False):
            start = self._before[id(seed)]
            seed.assign(start + number * np.asarray(share.first, start.dtype))

    def end(self, shares: Sequence[BatchShare], training: bool) -> None:
        """Gives all replicas the state after the whole batch."""
        counts = [share.count for share in shares]
        number = sum(counts)
        for seed, drawn in zip(self._seeds, self._drawn.get(training, ()), strict=False):
            start = self._before[id(seed)]
            seed.assign(start + drawn * np.asarray(number, start.dtype))
        self._add_up_metrics(counts)
        if training:
            for statistics in self._of_batch:
                if self._peers.size > 1:
                    statistics.merge(self._peers, counts)
                statistics.finish()
            self._put_in_turn(counts)

    def _put_in_turn(self, counts: Sequence[int]) -> None:
        """Gives all replicas the averages that take in one micro-batch after the other."""
        factors = {id(variable): factor for variable, factor in self._in_turn}
        for variable, values in _of_all(self._peers, [variable for variable, _ in self._in_turn]):
            # k micro-batches turn v into a^k v + c. Each replica began at the same v, so its c is
            # its value less a^k v.
            total = start = self._before[id(variable)]
            factor = factors[id(variable)]
            for theirs, count in zip(values, counts, strict=True):
                if count:
                    total = factor**count * total + (theirs - factor**count * start)
            variable.assign(total.astype(values.dtype))

    def _add_up_metrics(self, counts: Sequence[int]) -> None:
        for variable, values in _of_all(self._peers, list(self._metrics.values())):
            start = self._before[id(variable)]
            added = [theirs - start for theirs, count in zip(values, counts, strict=True) if count]
            variable.assign(sum(added, start))

    @property
    def _in_turn(self) -> list[tuple[Any, float]]:
        """The averages that take in one micro-batch after the other, as far as stages are traced.

        Until then it is all of them; see `BatchStatistics`.
        """
        of_batch = {id(v) for statistics in self._of_batch for v in statistics.averages}
        return [pair for key, pair in self._statistics.items() if key not in of_batch]

    @property
    def _variables(self) -> list[Any]:
        statistics = (variable for variable, _ in self._statistics.values())
        return [*self._seeds, *statistics, *self._metrics.values()]
