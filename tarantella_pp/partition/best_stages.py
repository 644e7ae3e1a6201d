"""The best stages for some options: what they are priced by, and how good they are."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.cut import Cut, Price, Prices, best_cut
from tarantella_pp.partition.graph.ideals import Array, Blocks
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import wire_bytes
from tarantella_pp.partition.options import Settings
from tarantella_pp.partition.plan.plan_parts import TOLERANCE, Certificate, CutEdge
from tarantella_pp.partition.rank_balancing import balance_ranks, rank_totals
from tarantella_pp.partition.stage_costs import StageCostModel

# Stage of each operation.
Assignment = tuple[int, ...]
# Share by which measured seconds of stages differ that count as equal: nobody measures them more
# exactly, and a tensor more that crosses a network costs more than that.
ALIKE = 0.02
# How often less memory is allowed, where messages to several stages come on top.
MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan in numbers."""

    # Stage of each node, in node order; stages count from 0 in pipeline order
    assignment: tuple[int, ...]
    certificate: Certificate  # how good the plan is known to be


def sums_of(costs: StageCostModel, options: Settings) -> Prices:
    """Returns what stages cost by their sums alone.

    Exact for time and FLOPs. Memory counts as state and kept activations; where a stage recomputes,
    as the activations of the micro-batches that run backward at a time.
    """
    count, alike, none = options.num_stages, TOLERANCE / 4, np.zeros(len(costs.graph.nodes))
    once, each, times = costs.flops(), none, np.ones(count)
    if options.balance == "time" and costs.seconds is not None:
        each, backward = np.array(costs.seconds).T
        once, times, alike = each + backward, np.array(options.repeated), ALIKE
    elif options.balance == "memory":
        once, each = state_sums(costs), activation_sums(costs)
        held = [options.repeats.get(s, held) for s, held in enumerate(options.in_flight)]
        times = np.array(held, float)
    return Prices(once, each, times, wires=wires(costs), alike=alike)


def best_solution(
    costs: StageCostModel, options: Settings, blocks: Blocks | None = None, *, whole: bool = True
) -> Solution:
    """Finds the stages whose dearest costs the least; not `whole`, memory counts by its sums."""
    begun = time.perf_counter()
    blocks = Blocks.of(costs.graph) if blocks is None else blocks
    if len(blocks) < options.num_stages:
        raise PlanError(
            f"No plan has a node on each of {options.num_stages} stages: only {len(blocks)} groups "
            f"of nodes can be told apart. Ask for fewer stages.{_shared(costs.graph)}"
        )
    whole = options.weighs_stages and (whole or bool(options.repeats))
    best, cut = _within_limits(costs, options, blocks, whole=whole)
    bound, method = cut.bound, cut.method
    if options.ranks:
        best = _over_ranks(costs, options, best)
        sums = sums_of(costs, options)
        share = (sums.once + sums.times.min() * sums.each).sum() / (1 + max(options.ranks))
        bound, method = max(bound, float(share)), f"{method}, then over ranks"
    elif options.balance == "memory":
        method += ", stages priced whole" if whole else " of state and activations"
    value, seconds = value_of(costs, options, best, whole=whole), time.perf_counter() - begun
    return Solution(best, Certificate.of(value, bound, method, seconds))


def _within_limits(
    costs: StageCostModel, options: Settings, blocks: Blocks, *, whole: bool
) -> tuple[Assignment, Cut]:
    """Finds the best stages that keep the memory limits, and how they were found."""
    sums, limits = sums_of(costs, options), limits_of(options)
    if not whole and options.memory_limit is None:
        cut = best_cut(blocks, sums)
        if cut is not None:
            return cut.assignments[0], cut
    known: Assignment | None = None
    bound: float | None = None
    first = best_cut(blocks, sums) if costs.shards > 1 else None
    if first is not None:  # the replicas' shares depend on the stages, and are no bound
        known, bound = first.assignments[0], first.bound
    if not whole:  # nothing to look for, slowly, if not even the stages of least memory are small
        memory = sums_of(costs, msgspec.structs.replace(options, balance="memory"))
        small = _priced(memory, StageMemory(costs, options, limits, known), whole=True)
        limits = limits if best_cut(blocks, small) is not None or blocks.ideals is None else ()
    for _ in range(MOST_ATTEMPTS if limits else 0):
        cut = best_cut(
            blocks, _priced(sums, StageMemory(costs, options, limits, known), whole=whole)
        )
        if cut is None:
            break
        bound = cut.bound if bound is None else bound
        found = [one for one in cut.assignments if excess(costs, options, one) <= 0]
        if found:
            best = min(found, key=functools.partial(value_of, costs, options, whole=whole))
            return best, replace(cut, bound=bound)
        above = excess(costs, options, cut.assignments[0])
        limits = [max(1.0, most - above) for most in limits]
    if not whole and blocks.ideals is None:  # what needs the least memory may lie on no such line
        smallest = msgspec.structs.replace(options, balance="memory")
        best, cut = _within_limits(costs, smallest, blocks, whole=True)
        return best, replace(cut, bound=sums.bound(blocks))
    raise PlanError(
        f"No plan of {options.num_stages} stages keeps the memory limit. Received: memory_limit="
        f"{options.memory_limit}. More stages, more micro-batches of a smaller size or "
        f"recomputation need less.{_shared(costs.graph)}"
    )


def _priced(sums: Prices, memory: StageMemory, *, whole: bool) -> Prices:
    """Prices stages by their memory, or by their sums if that keeps the limits."""
    if whole:
        return replace(sums, price=memory.usual, least=memory.least, most=max(memory.limits))

    def kept(price: Price) -> Price:
        return lambda *stage: 0.0 if price(*stage) < math.inf else math.inf

    return replace(sums, price=kept(memory.usual), least=kept(memory.least))


def given_solution(costs: StageCostModel, options: Settings, assignment: Sequence[int]) -> Solution:
    """Prices stages that are given; raises `PlanError` where they do not keep the limit."""
    above = excess(costs, options, assignment)
    if above > 0:
        raise PlanError(
            f"A stage of those that are given needs {above:.0f} bytes more than it may have. "
            f"Received: memory_limit={options.memory_limit}"
        )
    value = value_of(costs, options, assignment, whole=True)
    return Solution(tuple(assignment), Certificate.of(value, 0.0, "as given", 0.0))


def _over_ranks(costs: StageCostModel, options: Settings, best: Assignment) -> Assignment:
    """Makes the largest rank smaller where ranks have several stages, within the limits."""
    memory = sums_of(costs, msgspec.structs.replace(options, balance="memory"))
    limits = None if options.limits is None else (memory, options.limits)
    moved = balance_ranks(
        sums_of(costs, options), best, options.ranks, options.bubble_weight,
        groups=costs.graph.groups, limits=limits,
    )  # fmt: skip

    def step(assignment: Assignment) -> float:
        values = _values(costs, options, assignment, whole=False)
        most = float(max(rank_totals(values, options.ranks)))
        return most + options.bubble_weight * max(values)

    return moved if step(moved) < step(best) and excess(costs, options, moved) <= 0 else best


def excess(costs: StageCostModel, options: Settings, assignment: Sequence[int]) -> float:
    """Bytes of the stage that is most above its limit; 0 or less where all keep it."""
    if options.limits is None:
        return 0.0
    stages = costs.stages(assignment, options.in_flight, options.repeats)
    pairs = zip(stages, options.limits, strict=True)
    return max(stage.memory_bytes - most for stage, most in pairs)


def limits_of(options: Settings) -> Sequence[float]:
    """What each stage may have, infinitely much where nothing is said."""
    return options.limits or (math.inf,) * options.num_stages


def value_of(
    costs: StageCostModel, options: Settings, assignment: Sequence[int], *, whole: bool
) -> float:
    """The largest stage, or rank where ranks have several."""
    return float(max(rank_totals(_values(costs, options, assignment, whole=whole), options.ranks)))


def _values(
    costs: StageCostModel, options: Settings, assignment: Sequence[int], *, whole: bool
) -> list[float]:
    """FLOPs, seconds or bytes of each stage."""
    if options.balance == "flops":
        return list(np.bincount(assignment, costs.flops(), options.num_stages))
    stages = costs.stages(assignment, options.in_flight, options.repeats)
    if options.balance == "time":
        return [
            (stage.seconds or 0.0) + (stage.forward_seconds or 0.0) * again
            for stage, again in zip(stages, options.repeated, strict=True)
        ]
    return [float(stage.memory_bytes if whole else stage.lasting_bytes) for stage in stages]


def _shared(graph: LayerGraph) -> str:
    """Says which operations must stay together."""
    if not graph.groups:
        return ""
    first = max(graph.groups, key=len)
    names = ", ".join(graph.nodes[i].name for i in sorted(first)[:4])
    return (
        " Operations that share statistics or seeds, which change whenever one of them runs, must "
        f"stay on one stage, e.g. {names}."
    )


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
        """Prices a stage both ways, once; a stage above its limit is infinitely dear."""
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
            nodes, stage, last, (options.in_flight[stage], options.repeats.get(stage, 0)),
            (*received, *sent), users, self._replicas,
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
