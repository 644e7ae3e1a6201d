"""What forward passes write - seeds, statistics, metrics - as if one pipeline had run them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tarantella_pp.internals.functional import layer_metrics, sublayers
from tarantella_pp.internals.training import running_states
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.process_groups import ReplicaExchange
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.data.batch import BatchShare
from tarantella_pp.runtime.stage.batch_statistics import BatchStatistics

Array = np.ndarray[Any, Any]


class ForwardState:
    """Lets replicas go on where the one before ends, and agree on the state after a step.

    Seeds count what has been drawn. So a replica begins with the count that the micro-batches of
    the replicas before it lead to, and after the step all have the last replica's. Moving
    averages take in the statistics of the whole batch; see `BatchStatistics`. Where layers take in
    one micro-batch after the other, all replicas get the mean of theirs. Metrics of layers get the
    sum of what the replicas add to them.
    """

    def __init__(
        self, calls: Sequence[Call], statistics: Sequence[BatchStatistics], peers: Communicator
    ) -> None:
        self._exchange = ReplicaExchange(peers)
        self._of_batch = statistics
        self._averages: dict[int, Any] = {}
        seeds: dict[int, Any] = {}
        shared = calls if peers.size > 1 else ()
        for layer in (call.operation for call in shared):
            if not isinstance(layer, keras.Layer):
                continue
            for part in sublayers(layer):
                if isinstance(part, keras.layers.BatchNormalization):
                    self._averages |= {id(v): v for v in part.non_trainable_variables}
            seeds |= {id(state): state for state in running_states(layer)}
        metrics = [metric for call in shared for metric in layer_metrics(call.operation)]
        self._metrics = {id(v): v for metric in metrics for v in metric.variables}
        # What is neither an average nor a metric counts draws of random numbers.
        known = {*self._averages, *self._metrics}
        self._seeds = [v for key, v in seeds.items() if key not in known]
        self._drawn: dict[bool, list[Array]] = {}
        self._before: dict[int, Array] = {}

    @contextlib.contextmanager
    def measuring(self, training: bool) -> Iterator[bool]:
        """Learns what one micro-batch draws, which runs inside if that is yet unknown."""
        if not self._seeds or training in self._drawn:
            yield False
            return
        variables = [*self._seeds, *self._averages.values(), *self._metrics.values()]
        before = [value_of(variable) for variable in variables]
        try:
            yield True
            pairs = zip(self._seeds, before, strict=False)
            self._drawn[training] = [value_of(seed) - start for seed, start in pairs]
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def begin(self, share: BatchShare, training: bool) -> None:
        """Sets seeds to where the replicas before this one leave them."""
        kept = (*self._seeds, *self._metrics.values())
        self._before = {id(variable): value_of(variable) for variable in kept}
        self._set_seeds(share.first, training)

    def end(self, shares: Sequence[BatchShare], training: bool) -> None:
        """Gives all replicas the state after the whole batch."""
        counts = [share.count for share in shares]
        self._set_seeds(sum(counts), training)
        self._add_up_metrics(counts)
        if training:
            for statistics in self._of_batch:
                if len(shares) > 1:
                    everywhere = self._exchange.values_of_all(statistics.variables)
                    statistics.merge(everywhere, counts)
                statistics.finish()
            self._average(counts)

    def _set_seeds(self, number: int, training: bool) -> None:
        """Sets seeds to where some number of micro-batches leave them."""
        for seed, drawn in zip(self._seeds, self._drawn.get(training, ()), strict=False):
            start = self._before[id(seed)]
            seed.assign(start + drawn * np.asarray(number, start.dtype))

    def _average(self, counts: Sequence[int]) -> None:
        """Averages what takes in one micro-batch after the other, as far as stages are traced."""
        of_batch = {id(v) for statistics in self._of_batch for v in statistics.averages}
        variables = [v for key, v in self._averages.items() if key not in of_batch]
        everywhere = self._exchange.values_of_all(variables)
        for variable, values in zip(variables, everywhere, strict=True):
            theirs = values[np.asarray(counts) > 0]  # a spare replica has run one nevertheless
            # Those that do not change, of frozen layers, keep their bits.
            variable.assign(theirs[0] + (theirs - theirs[0]).mean(axis=0).astype(values.dtype))

    def _add_up_metrics(self, counts: Sequence[int]) -> None:
        variables = list(self._metrics.values())
        everywhere = self._exchange.values_of_all(variables)
        for variable, values in zip(variables, everywhere, strict=True):
            start = self._before[id(variable)]
            added = [theirs - start for theirs, count in zip(values, counts, strict=True) if count]
            variable.assign(sum(added, start))
