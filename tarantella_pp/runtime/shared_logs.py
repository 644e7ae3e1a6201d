"""Logs and metrics of a step: put together on the rank of the last stage, known to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.runtime.batch.batch_step import BatchStep
from tarantella_pp.runtime.batch.logs import LogExchange
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.stage.layer_metrics import LayerMetrics
from tarantella_pp.runtime.state.remote_variables import OF_METRICS, Clock, make_remote
from tarantella_pp.runtime.state.variable_sync import broadcast_variable


class SharedLogs:
    """What the ranks of a pipeline know of its losses and metrics.

    Attributes:
        exchange: The messages.
        of_layers: The metrics that layers have.
    """

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        placement: Sequence[int],
        groups: ProcessGroups,
    ) -> None:
        self.exchange = LogExchange(groups.pipeline, placement[-1])
        self.of_layers = LayerMetrics(extracted, assignment, placement)
        self._model = model
        self._ranks = groups.pipeline
        self._num_replicas = groups.num_replicas
        self._last = placement[-1]
        self._clock = Clock(OF_METRICS)
        self._differ = False

    @property
    def reports_late(self) -> bool:
        """Whether what layers have measured is known only once replicas have added it up."""
        return self.of_layers.exist and self._num_replicas > 1

    def report(self, added: tf.Tensor) -> None:
        """Tells the rank of the last stage what this one adds; see `LogExchange.report`."""
        self.exchange.report(added, self.of_layers.state(self._ranks.rank))

    def share(self, kind: str, step: BatchStep) -> dict[str, Any]:
        """Gives every rank the logs of a step; all must call it."""
        if self.reports_late:
            self.report(step.added)
        self.metrics_change()
        logs: Mapping[str, Any] = {}
        if self.exchange.is_source:
            losses, metrics = self.exchange.reports(self.of_layers.size)
            self.of_layers.take(metrics)
            logs = step.logs(losses)
        return self.exchange.share_logs(kind, logs)

    def metrics_change(self) -> None:
        """Notes that metrics are updated, on the ranks that have them."""
        self._differ = True
        self._clock.advance()

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics, if they have changed; all must call it."""
        if not self._differ:
            return
        for variable, owner in self.metric_variables():
            broadcast_variable(variable, owner, self._ranks)
        self._differ = False

    def guard_metrics(self) -> None:
        """Has metrics refuse to be read where they are out of date."""
        for variable, owner in self.metric_variables():
            if owner != self._ranks.rank:
                make_remote(variable, self._clock)

    def metric_variables(self) -> Iterator[tuple[Any, int]]:
        """The variables of all metrics by now, each with the rank that updates it."""
        for metric in self._model.metrics:
            for variable in metric.variables:
                owner = self.of_layers.owner(variable)
                yield variable, self._last if owner is None else owner
