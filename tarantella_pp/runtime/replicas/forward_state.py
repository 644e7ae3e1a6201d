"""What forward passes write - seeds, statistics, metrics - as if one pipeline had run them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tarantella_pp.keras_internals.functional import layer_metrics
from tarantella_pp.keras_internals.training import layers_in, running_states
from tarantella_pp.partition.extraction.calls import Call
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.replicas.batch_share import BatchShare
from tarantella_pp.runtime.replicas.batch_statistics import BatchStatistics

Array = np.ndarray[Any, Any]


class ForwardState:
    """Lets replicas go on where the one before ends, and agree on the state after a step.

    Seeds count what has been drawn. So a replica begins with the count that the micro-batches of
    the replicas before it lead to, and after the step all have that of the last one. Moving
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
            for part in layers_in(layer):
                if isinstance(part, keras.layers.BatchNormalization):
                    for variable in part.non_trainable_variables:
                        self._statistics[id(variable)] = variable, part.momentum**times
            seeds.update({id(state): state for state in running_states(layer)})
        metrics = [m for call in calls for m in layer_metrics(call.operation)]
        variables = [v for metric in metrics for v in metric.variables] if peers.size > 1 else []
        self._metrics = {id(v): v for v in variables}
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
        in_turn = self._in_turn
        gathered = [
            self._peers.start_allgather([value_of(variable)[None]], label="statistics")
            for variable, _ in in_turn
        ]
        for (variable, factor), request in zip(in_turn, gathered, strict=True):
            total = start = self._before[id(variable)]
            values = request.wait()[0]
            for theirs, count in zip(values, counts, strict=True):
                if count:
                    total = factor**count * total + (theirs - factor**count * start)
            variable.assign(total.astype(values.dtype))

    def _add_up_metrics(self, counts: Sequence[int]) -> None:
        metrics = list(self._metrics.values())
        requests = [
            self._peers.start_allgather([value_of(variable)[None]], label="metrics of layers")
            for variable in metrics
        ]
        for variable, request in zip(metrics, requests, strict=True):
            values, start = request.wait()[0], self._before[id(variable)]
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
