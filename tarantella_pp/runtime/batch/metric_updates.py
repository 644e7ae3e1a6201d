"""Compiled metrics: updated with one micro-batch after the other, where that is exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.partition.costs.peak_memory import WAITING_OUTPUTS
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.probes.metric_probe import why_not_by_parts
from tarantella_pp.runtime.tf_graph.compiled_function import CompiledFunction, dense_tensors


class MetricUpdates:
    """Updates a model's compiled metrics, on the rank of the last stage.

    A metric is additive if it ends in the same state whether it is updated with a batch or with
    its parts, as all of Keras' own are but for means of something that looks at several samples.
    Where all are, they are updated while the rank waits, and outputs are let go. Otherwise all
    outputs of a batch are kept, and the metrics updated with all of it at once.
    """

    def __init__(self, metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any]) -> None:
        self._metrics = metrics
        self._pack = pack
        self._reasons: dict[Hashable, str | None] = {}
        self._compiled: dict[Hashable, CompiledFunction] = {}
        self._waiting: deque[tuple[Hashable, list[tf.Tensor]]] = deque()

    @property
    def variables(self) -> list[Any]:
        """The state of the metrics."""
        return [] if self._metrics is None else list(self._metrics.variables)

    def why_whole(
        self, batch: Batch, outputs: Sequence[tf.TensorSpec], replicas: bool = False
    ) -> str | None:
        """Finds out why the metrics need the outputs of a whole batch."""
        if self._metrics is None:
            return None
        if batch.signature not in self._reasons:
            self._reasons[batch.signature] = why_not_by_parts(
                self._metrics, self._pack, batch.y, outputs, batch.sample_weight, replicas
            )
        return self._reasons[batch.signature]

    def add(self, y: Any, results: Sequence[tf.Tensor], weight: Any, signature: Hashable) -> None:
        """Takes samples to update the metrics with, now or later."""
        if self._metrics is None:
            return
        arguments = (y, list(results), weight)
        if signature not in self._compiled:
            self._compiled[signature] = CompiledFunction.like(
                self._update, arguments, any_rows=True
            )
        self._waiting.append((signature, dense_tensors(arguments)))

    def run_pending(self) -> bool:
        """Updates the metrics with what has waited longest; returns whether there was anything."""
        if not self._waiting:
            return False
        signature, tensors = self._waiting.popleft()
        self._compiled[signature](*tensors)
        return True

    def flush_overdue(self) -> bool:
        """Does what must not be left for later; returns whether there was anything."""
        return len(self._waiting) > WAITING_OUTPUTS and self.run_pending()

    def finish(self) -> None:
        """Does all that is left."""
        while self.run_pending():
            pass

    def clear(self) -> None:
        """Forgets what is left, of a step that does not end."""
        self._waiting.clear()

    def _update(self, y: Any, results: list[tf.Tensor], weight: Any) -> None:
        self._metrics.update_state(y, self._pack(results), weight)
