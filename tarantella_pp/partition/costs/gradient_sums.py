"""Memory in which gradients and new values of weights travel between replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.graph.layer_graph import LOOKUPS, LayerGraph, Weight
from tarantella_pp.partition.graph.units import item_bytes, wire_bytes
from tarantella_pp.partition.plan.plan_parts import FUSION_THRESHOLD, PlanConfig

INDEX_BYTES = 8
"""Bytes of the number of a row that travels with it."""


@dataclass(frozen=True, slots=True)
class GradientSums:
    """How gradients are summed over replicas, as far as memory depends on it.

    The runtime uses the memory again in the next step, so it is there all the time. Of a weight::

                  packed       as sent       parts of others    sum      new values
        plain     its size                                      its size
        sharded   its size                   of the own share            of others' shares
        bfloat16               half          sums of half size  its size, or the share

    What is packed alone in its bucket is not copied, so that this is at most that much too much.
    The gradient of an embedding table travels as the rows that all replicas look up.

    Attributes:
        replicas: Number of replicas.
        sharded: Whether each weight is updated by one of them, for all.
        fusion_threshold: Most bytes of a bucket.
        gradient_dtype: Dtype in which gradients travel; `None` for their own.
    """

    replicas: int = 1
    sharded: bool = False
    fusion_threshold: int = FUSION_THRESHOLD
    gradient_dtype: str | None = None

    @classmethod
    def of(cls, config: PlanConfig) -> GradientSums:
        """Returns the sums of a plan, or of its options."""
        return cls(
            config.num_replicas, config.shards > 1, config.fusion_threshold, config.gradient_dtype
        )

    def weight_bytes(self, graph: LayerGraph, rows: int, share: float) -> Sequence[float]:
        """Counts the memory of each weight on the rank that trains it."""
        if self.replicas == 1:
            return [0.0] * len(graph.weights)
        ids, dense, tables = _lookups(graph)
        return [
            self._bytes(weight, share, weight.id in tables, None if weight.id in dense else seen)
            if weight.trainable
            else 0.0
            for weight in graph.weights
            for seen in [rows * ids[weight.id]]
        ]

    def _bytes(self, weight: Weight, share: float, is_table: bool, seen: float | None) -> float:
        """Bytes of one weight and the rows of it that are looked up; `None` if all are used."""
        size = weight.bytes
        sent = wire_bytes(size, weight.dtype, self.gradient_dtype)
        rounded = sent < size
        values = (1 - share) * size if self.sharded else 0.0
        if seen is not None:
            row = sent // weight.shape[0] + INDEX_BYTES
            return self.replicas * seen * row + values
        packed = size if size <= self.fusion_threshold and not is_table else 0
        if not self.sharded:
            return packed + sent + rounded * (sent + size)
        parts = (self.replicas - 1) * share * sent
        return packed + parts + rounded * (sent + share * size) + values


def _lookups(graph: LayerGraph) -> tuple[Counter[int], set[int], set[int]]:
    """Rows of a sample that are looked up in each weight, weights used otherwise, and tables."""
    ids: Counter[int] = Counter()
    dense: set[int] = set()
    tables: set[int] = set()
    for node in graph.nodes:
        if node.kind not in LOOKUPS:
            dense.update(node.weights)
            continue
        tables.update(node.weights)
        made = graph.tensors[node.outputs[0]]
        for weight in node.weights:
            row = graph.weights[weight].shape[-1] * item_bytes(made.dtype)
            ids[weight] += made.bytes_per_sample // row
    return ids, dense, tables
