"""What stages cost: memory, arithmetic and messages, summed up from the nodes of a layer graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.graph import LayerGraph, Tensor
from tarantella_pp.partition.plan_parts import CutEdge, StagePlan
from tarantella_pp.partition.sizes import sample_shape


@dataclass(frozen=True, slots=True)
class Costs:
    """A layer graph together with what its costs depend on besides.

    The figures of the nodes are those of the graph: to plan with measured ones, put them into
    its nodes (`keeps`, `residual_bytes`, `flops`) and mark them as measured.

    Attributes:
        graph: The layer graph.
        slots: Bytes of optimizer slots for each variable of the graph.
        rows: Samples of one micro-batch.
    """

    graph: LayerGraph
    slots: Sequence[int]
    rows: int

    def state_bytes(self, weight: int) -> int:
        """Returns the bytes of a variable, its gradient and its optimizer slots.

        Args:
            weight: Id of the variable.
        """
        found = self.graph.weights[weight]
        return found.bytes * (2 if found.trainable else 1) + self.slots[weight]

    def keepers(self) -> dict[int, list[int]]:
        """Returns which nodes need which memory again in their backward pass.

        Returns:
            From the id of each kept tensor, views resolved, to nodes in ascending order.
        """
        found: dict[int, dict[int, None]] = {}
        for node in self.graph.nodes:
            for tensor in node.keeps:
                found.setdefault(self.graph.storage(tensor), {})[node.id] = None
        return {tensor: list(nodes) for tensor, nodes in found.items()}

    def mask_bytes(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor's mask for one micro-batch; 0 without one.

        Args:
            tensor: The tensor.
        """
        if tensor.mask_shape is None:
            return 0
        return self.rows * math.prod(sample_shape(tensor.mask_shape, self.graph.assumed_size or 1))

    def cuts(self, assignment: Sequence[int]) -> tuple[CutEdge, ...]:
        """Returns the tensors that are sent between stages.

        Args:
            assignment: Stage of each node.
        """
        last = max(assignment)
        found = []
        for tensor in self.graph.tensors:
            if tensor.producer is None:
                continue
            source = assignment[tensor.producer]
            readers = {assignment[node] for node in tensor.consumers}
            if tensor.id in self.graph.outputs:
                readers.add(last)  # where the loss is computed
            if targets := sorted(readers - {source}):
                found.append(
                    CutEdge(
                        tensor=tensor.name,
                        source=source,
                        targets=tuple(targets),
                        dtype=tensor.dtype,
                        bytes=self.rows * tensor.bytes_per_sample,
                        has_gradient=tensor.has_gradient,
                        mask_bytes=self.mask_bytes(tensor),
                    )
                )
        return tuple(found)

    def stages(self, assignment: Sequence[int], in_flight: Sequence[int]) -> tuple[StagePlan, ...]:
        """Returns what each stage costs.

        Args:
            assignment: Stage of each node; every stage has one.
            in_flight: Most micro-batches that each stage holds at a time.
        """
        cuts = self.cuts(assignment)
        return tuple(
            self._stage([i for i, s in enumerate(assignment) if s == stage], stage, held, cuts)
            for stage, held in enumerate(in_flight)
        )

    def _stage(
        self, ids: list[int], stage: int, in_flight: int, cuts: tuple[CutEdge, ...]
    ) -> StagePlan:
        graph = self.graph
        nodes = [graph.nodes[i] for i in ids]
        used = {w for node in nodes for w in node.weights}
        weights = [graph.weights[w] for w in used]
        parameters = sum(weight.bytes for weight in weights if weight.trainable)
        kept = {graph.storage(tensor) for node in nodes for tensor in node.keeps}
        per_sample = sum(graph.tensors[tensor].bytes_per_sample for tensor in kept)
        per_sample += math.ceil(sum(node.residual_bytes for node in nodes))
        touching = [cut for cut in cuts if stage == cut.source or stage in cut.targets]
        return StagePlan(
            first=nodes[0].name,
            last=nodes[-1].name,
            nodes=len(nodes),
            parameter_bytes=parameters,
            constant_bytes=sum(weight.bytes for weight in weights if not weight.trainable),
            gradient_bytes=parameters,
            optimizer_bytes=sum(self.slots[w] for w in used),
            activation_bytes=self.rows * per_sample,
            in_flight=in_flight,
            buffer_bytes=sum(c.bytes * (1 + c.has_gradient) + c.mask_bytes for c in touching),
            flops=sum(node.flops for node in nodes),
        )
