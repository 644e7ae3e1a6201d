"""What a stage between two down-sets has in memory, priced whole and by its sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tarantella_pp.partition.graph.ideals import Array
from tarantella_pp.partition.graph.units import wire_bytes
from tarantella_pp.partition.options import Settings
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.partition.stage_costs import StageCostModel


def state_sums(costs: StageCostModel) -> Array:
    """Bytes of variables, gradients and optimizer state, each for the first node that uses it."""
    state, summed = np.zeros(len(costs.graph.nodes)), costs.reduction_bytes()
    counted: set[int] = set()
    for node in costs.graph.nodes:
        own = [w for w in node.weights if w not in counted]
        state[node.id] = sum(costs.state_bytes(w) + summed[w] for w in own)
        counted.update(node.weights)
    return state


def activation_sums(costs: StageCostModel) -> Array:
    """Bytes of a micro-batch that each node keeps; what several keep counts for the first."""
    graph, rows = costs.graph, costs.micro_batch_size
    kept = np.array([rows * node.residual_bytes for node in graph.nodes])
    for tensor, nodes in costs.keepers().items():
        kept[nodes[0]] += rows * graph.tensors[tensor].bytes_per_sample
    return kept


def wires(costs: StageCostModel) -> list[tuple[tuple[int, ...], float]]:
    """Returns who makes and who reads each tensor, and the bytes that travel if they part.

    Activations, masks and gradients of a micro-batch; gradients and values of shared variables.
    """
    graph, found = costs.graph, []
    for tensor in graph.tensors:
        if tensor.producer is not None and tensor.consumers:
            sent = wire_bytes(tensor.bytes_per_sample, tensor.dtype, costs.sent_as)
            size = costs.micro_batch_size * sent * (1 + tensor.has_gradient)
            nodes = (tensor.producer, *tensor.consumers)
            found.append((nodes, float(size + costs.mask_bytes(tensor))))
    for nodes, weights in graph.ties.items():
        found.append((nodes, float(sum(map(costs.copy_bytes, weights)))))
    return found


class StageMemory:
    """Prices stages between two down-sets, whose operations are bits.

    A stage does not know from how many others its messages come, and waits for the largest of each:
    `usual` is the price as if they were from one, `least` as if each were from another.
    Optimizers that are shared out over replicas are taken as a known plan has them.
    """

    def __init__(
        self,
        costs: StageCostModel,
        options: Settings,
        limits: Sequence[float],
        known: Sequence[int] | None = None,
    ) -> None:
        self._costs, self._options = costs, options
        graph = costs.graph
        users = [()] * len(graph.weights) if known is None else graph.users(known)
        self._replicas = costs.replicas(users)
        self._summed = costs.reduction_bytes(1.0 if costs.shards == 1 else None)
        self.limits = limits
        self._outputs = set(graph.outputs)
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._readers = [sum(1 << node for node in set(t.consumers)) for t in graph.tensors]
        self._users = [0] * len(graph.weights)
        for node in graph.nodes:
            for weight in node.weights:
                self._users[weight] |= 1 << node.id

    def usual(self, begin: int, end: int, stage: int) -> float:
        """Prices a stage that exchanges messages with its neighbours."""
        return self._priced(begin, end, stage)[0]

    def least(self, begin: int, end: int, stage: int) -> float:
        """Prices a stage at the least, wherever its messages come from and go to."""
        return self._priced(begin, end, stage)[1]

    def _priced(self, begin: int, end: int, stage: int) -> tuple[float, float]:
        """Prices a stage both ways, once; what is above its limit is infinitely dear."""
        if (begin, end, stage) not in self._known:
            prices = self._price(begin, end, stage)
            most = self.limits[stage]
            self._known[begin, end, stage] = (
                prices[0] if prices[0] <= most else math.inf,
                prices[1] if prices[1] <= most else math.inf,
            )
        return self._known[begin, end, stage]

    def _price(self, begin: int, end: int, stage: int) -> tuple[float, float]:
        costs, options, last = self._costs, self._options, self._options.num_stages - 1
        nodes = _members(end & ~begin)
        users = self._stages_of_weights(nodes, begin, end, stage)
        received, sent = self._messages(nodes, begin, end, stage)
        priced = costs.stage(
            nodes, stage, last, options.in_flight[stage], (*received, *sent), users,
            options.repeats.get(stage, 0), self._replicas,
        )  # fmt: skip
        size = priced.memory_bytes + sum(self._summed[w] for w in users if users[w][0] == stage)
        wire = costs.sent_as
        arriving = [[cut.sent_bytes(wire) + cut.mask_bytes for cut in received]]
        arriving += [[cut.sent_bytes(wire) for cut in sent if cut.has_gradient]]
        together = [sum(sizes) for sizes in arriving]
        # From one stage only where there is no other.
        alone = [stage == 1, stage == last - 1]
        apart = [
            all_ if one else max(sizes, default=0)
            for all_, sizes, one in zip(together, arriving, alone, strict=True)
        ]
        return size, size - max(together) + max(apart)

    def _stages_of_weights(
        self, nodes: Sequence[int], begin: int, end: int, stage: int
    ) -> dict[int, tuple[int, ...]]:
        """Returns the stages that use each variable of a stage, as if there were three."""
        found = {}
        for node in nodes:
            for weight in self._costs.graph.nodes[node].weights:
                used = self._users[weight]
                earlier, later = used & begin, used & ~end
                found[weight] = (*[stage - 1] * bool(earlier), stage, *[stage + 1] * bool(later))
        return found

    def _messages(
        self, nodes: Sequence[int], begin: int, end: int, stage: int
    ) -> tuple[list[CutEdge], list[CutEdge]]:
        """Returns what a stage receives from the one before, and sends to the next."""
        graph, cut, is_last = (
            self._costs.graph,
            self._costs.cut,
            stage == self._options.num_stages - 1,
        )
        read = {tensor for node in nodes for tensor in graph.nodes[node].inputs}
        if is_last:
            read |= self._outputs
        given = [graph.tensors[tensor] for tensor in sorted(read)]
        made = [t for node in nodes for t in graph.nodes[node].outputs]
        received = [
            cut(one, stage - 1, (stage,))
            for one in given
            if one.producer is not None and begin >> one.producer & 1
        ]
        sent = [
            cut(graph.tensors[t], stage, (stage + 1,))
            for t in made
            if self._readers[t] & ~end or (t in self._outputs and not is_last)
        ]
        return received, sent


def _members(bits: int) -> list[int]:
    """Returns the operations of a set, ascending."""
    packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found
