"""The best stages for some options: what they are priced by, and how good they are."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.cut import Cut, Price, Prices, best_cut
from tarantella_pp.partition.graph.ideals import Array, Blocks, summed
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Weight
from tarantella_pp.partition.options import Settings
from tarantella_pp.partition.plan.peak_memory import reduction_bytes
from tarantella_pp.partition.plan.plan_parts import TOLERANCE, Certificate, CutEdge
from tarantella_pp.partition.plan.stage_costs import StageCostModel

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


def sums_of(costs: StageCostModel, options: Settings, *, likely: bool = False) -> Prices:
    """Returns what stages cost by their sums alone: state and kept activations, or time.

    They cost that at the least; `likely` is about what they need where all make things again.
    """
    count, alike, none = options.num_stages, TOLERANCE / 4, np.zeros(len(costs.graph.nodes))
    once, each, times = costs.flops(), none, np.ones(count)
    recomputes = np.array([options.recomputes(stage) for stage in range(count)])
    if options.balance == "time" and costs.seconds is not None:
        forward, backward = np.array(costs.seconds).T
        once, times, alike = forward + backward, recomputes.astype(float), ALIKE
        if recomputes.any():
            each = forward * [node.repeated for node in costs.repeating.nodes]
    elif options.balance == "memory":
        # Where some stages keep less than others the kept activations are left out of the sums.
        every = bool(recomputes.all())
        once, each = state_sums(costs), activation_sums(costs, again=every)
        times = np.array(options.in_flight, float) * (every | ~recomputes)
        if likely:
            # What is made again is there until its W is done; without R only parts of the last one.
            little, each = each.sum(), activation_sums(costs, again=False)
            held = np.array([n - (not whole) for n, whole in options.held_again], float)
            times = held + (times - held) * little / max(1.0, each.sum())
    made = activation_sums(costs, again=False) if options.balance == "memory" else none
    return Prices(once, each, times, made, wires=wires(costs), alike=alike)


def best_solution(
    costs: StageCostModel, options: Settings, blocks: Blocks, *, whole: bool, by_sums: bool
) -> Solution:
    """Finds the stages whose dearest costs the least.

    Not `whole`, memory counts by its sums; `by_sums`, it does so for limits, too.
    """
    begun = time.perf_counter()
    if len(blocks) < options.num_stages:
        raise PlanError(
            f"No plan has a node on each of {options.num_stages} stages: only {len(blocks)} groups "
            f"of nodes can be told apart. Ask for fewer stages.{_shared(costs.graph)}"
        )
    problem = _Problem(costs, options, whole, by_sums)
    best, cut = problem.within_limits(blocks)
    bound, method = cut.bound, cut.method
    if options.ranks:
        sums = problem.sums
        share = (sums.once + sums.times.min() * sums.each).sum() / (1 + max(options.ranks))
        bound = max(bound, float(share))
    elif options.balance == "memory":
        method += ", stages priced whole" if whole else " of state and activations"
    value, seconds = problem.value(best), time.perf_counter() - begun
    return Solution(best, Certificate.of(value, bound, method, seconds))


def given_solution(costs: StageCostModel, options: Settings, assignment: Sequence[int]) -> Solution:
    """Prices stages that are given; raises `PlanError` where they do not keep the limit."""
    problem = _Problem(costs, options, whole=True)
    above = problem.excess(assignment)
    if above > 0:
        raise PlanError(
            f"A stage of those that are given needs {above:.0f} bytes more than it may have. "
            f"Received: memory_limit={options.memory_limit}"
        )
    proof = Certificate.of(problem.value(assignment), 0.0, "as given", 0.0)
    return Solution(tuple(assignment), proof)


@dataclass(frozen=True)
class _Problem:
    """What stages cost, and what they must keep to."""

    costs: StageCostModel
    options: Settings
    whole: bool  # whether memory counts stage by stage, with what there is for a moment
    by_sums: bool = False  # whether no stage is priced before all of them are found

    @cached_property
    def sums(self) -> Prices:
        """What adds up over operations."""
        return sums_of(self.costs, self.options, likely=self.by_sums)

    @cached_property
    def _price(self) -> Price | None:
        return None if self.by_sums else StageMemory(self.costs).price

    @cached_property
    def memory(self) -> _Problem:
        """The same with memory to be balanced."""
        smallest = msgspec.structs.replace(self.options, balance="memory")
        return replace(self, options=smallest, whole=True)

    def within_limits(self, blocks: Blocks) -> tuple[Assignment, Cut]:
        """Finds the best stages that keep the memory limits, and how they were found."""
        options = self.options
        bound: float | None = None
        limits: Sequence[float] | None = options.limits
        if self.whole and self._price and limits and len(set(limits)) == 1:
            limits = None  # the smallest plan keeps it, if any does
        for _ in range(MOST_ATTEMPTS):
            cut = best_cut(blocks, self._prices(limits))
            if cut is None:
                break
            bound = cut.bound if bound is None else bound
            if found := [one for one in cut.assignments if self.excess(one) <= 0]:
                best = found[0] if len(found) == 1 else min(found, key=self.value)
                return best, replace(cut, bound=bound)
            if limits is None:
                break
            limits = self._lowered(limits, cut.assignments[0])
        if not self.whole and blocks.ideals is None:
            # What needs the least memory may lie on none of the lines that were tried.
            best, cut = self.memory.within_limits(blocks)
            return best, replace(cut, bound=self.sums.bound(blocks))
        raise PlanError(
            f"No plan of {options.num_stages} stages keeps the memory limit. Received: "
            f"memory_limit={options.memory_limit}. More stages, more micro-batches of a smaller "
            f"size or recomputation need less.{_shared(self.costs.graph)}"
        )

    def _prices(self, limits: Sequence[float] | None) -> Prices:
        """Prices stages by their memory, or by their sums if that keeps the limits."""
        if limits is None and not self.whole:
            return self.sums
        within = None if limits is None else (self.memory.sums, limits)
        return replace(self.sums, price=self._price, weighs=self.whole, limits=within)

    def _lowered(self, limits: Sequence[float], assignment: Assignment) -> tuple[float, ...]:
        """Limits to try next, where these stages do not keep the ones of the options."""
        if not self.by_sums:
            above = self.excess(assignment)
            return tuple(max(1.0, most - above) for most in limits)
        # What a stage has besides its sums hardly depends on where it begins and ends.
        memory = self.memory.sums
        sizes = [stage.memory_bytes for stage in self.costs.stages(assignment)]
        counted = summed(assignment, memory.once) + memory.times * summed(assignment, memory.each)
        lowered = np.array(self.options.limits) - (sizes - counted)
        return tuple(np.minimum(limits, lowered).tolist())

    def excess(self, assignment: Sequence[int]) -> float:
        """Bytes of the stage that is most above its limit; 0 or less where all keep it."""
        limits = self.options.limits
        if limits is None:
            return 0.0
        stages = self.costs.stages(assignment)
        return max(stage.memory_bytes - most for stage, most in zip(stages, limits, strict=True))

    def value(self, assignment: Sequence[int]) -> float:
        """FLOPs, seconds or bytes of the largest stage, or rank where ranks have several."""
        options, costs = self.options, self.costs
        if options.balance == "flops":
            values = list(np.bincount(assignment, costs.flops(), options.num_stages))
        elif options.balance == "time":
            values = [
                (stage.seconds or 0.0) + (stage.forward_seconds or 0.0) * stage.repeated
                for stage in costs.stages(assignment)
            ]
        else:
            values = [
                float(stage.memory_bytes if self.whole else stage.lasting_bytes)
                for stage in costs.stages(assignment)
            ]
        return float(max(rank_totals(values, options.ranks)))


def rank_totals(values: Sequence[float], ranks: Sequence[int]) -> Array:
    """Adds up the values of stages on each rank."""
    return summed(ranks, values, 1 + max(ranks)) if ranks else np.array(values)


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
    """Bytes of variables, gradients and optimizer state (its mean share), for their first users."""
    graph, shards = costs.graph, costs.config.shards
    summed = reduction_bytes(graph, costs.config, 1 / costs.config.num_replicas)
    state, counted = np.zeros(len(graph.nodes)), set[int]()
    for node in graph.nodes:
        for w in set(node.weights) - counted:
            own = _copy_bytes(graph.weights[w]) + costs.slots[w] / shards + summed[w]
            state[node.id] += own
        counted.update(node.weights)
    return state


def _copy_bytes(weight: Weight) -> int:
    """Bytes of a variable and its gradient, on a stage that does not train it."""
    return weight.bytes * (2 if weight.trainable else 1)


def activation_sums(costs: StageCostModel, *, again: bool) -> Array:
    """Bytes of a micro-batch that each node keeps; what several keep counts for the first."""
    graph, counted = costs.repeating if again else costs.keeping, set[int]()
    kept = np.array([node.residual_bytes for node in graph.nodes])
    for node in graph.nodes:
        tensors = {graph.storage(tensor) for tensor in node.keeps} - counted
        kept[node.id] += sum(graph.tensors[tensor].bytes_per_sample for tensor in tensors)
        counted |= tensors
    return costs.rows * kept


def wires(costs: StageCostModel) -> list[tuple[tuple[int, ...], float]]:
    """Returns who makes and reads each tensor or shared variable, and bytes cut between."""
    graph, found = costs.graph, []
    for tensor in graph.tensors:
        if tensor.producer is not None and tensor.consumers:
            cut = costs.cut(tensor, 0, ())
            size = costs.config.sent(cut) * (1 + tensor.has_gradient) + cut.mask_bytes
            found.append(((tensor.producer, *tensor.consumers), float(size)))
    for nodes, weights in graph.ties.items():
        found.append((nodes, float(sum(_copy_bytes(graph.weights[w]) for w in weights))))
    return found


class StageMemory:
    """Prices stages between two down-sets, whose operations are bits.

    A stage does not know from how many others its messages come, and waits for the largest of each:
    the price is as if they were from one, and at the least as if each were from another.
    """

    def __init__(self, costs: StageCostModel) -> None:
        self._costs = costs
        graph = costs.graph
        self._outputs = set(graph.outputs)
        self.price: Price = functools.cache(self._price)
        self._readers = [sum(1 << node for node in set(t.consumers)) for t in graph.tensors]
        self._tied = {
            weight: sum(1 << node for node in nodes)
            for nodes, weights in graph.ties.items()
            for weight in weights
        }

    def _price(self, begin: int, end: int, stage: int) -> tuple[float, float, float]:
        costs, options, last = self._costs, self._costs.config, self._costs.config.num_stages - 1
        bits = end & ~begin
        packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
        nodes = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
        users = self._stages_of_weights(nodes, begin, end, stage)
        received, sent = self._messages(nodes, begin, end, stage)
        found, shared = costs.stage(nodes, stage, (*received, *sent), users)
        size = found.memory_bytes
        arriving = [[options.sent(cut) + cut.mask_bytes for cut in received]]
        arriving += [[options.sent(cut) for cut in sent if cut.has_gradient]]
        together = [sum(sizes) for sizes in arriving]
        # From one stage only where there is no other.
        alone = [stage == 1, stage == last - 1]
        apart = [
            all_ if one else max(sizes, default=0)
            for all_, sizes, one in zip(together, arriving, alone, strict=True)
        ]
        # With an R it is the larger of two sums, of which stages around it may have less.
        shared *= not costs.held_again[stage].whole
        return size, size - max(together) + max(apart), shared

    def _stages_of_weights(
        self, nodes: Sequence[int], begin: int, end: int, stage: int
    ) -> dict[int, tuple[int, ...]]:
        """Returns the stages that use each variable of a stage, as if there were three."""
        graph = self._costs.graph
        found: dict[int, tuple[int, ...]]
        found = dict.fromkeys((w for n in nodes for w in graph.nodes[n].weights), (stage,))
        for weight in found.keys() & self._tied:
            used = self._tied[weight]
            before, after = bool(used & begin), bool(used & ~end)
            found[weight] = (*[stage - 1] * before, stage, *[stage + 1] * after)
        return found

    def _messages(
        self, nodes: Sequence[int], begin: int, end: int, stage: int
    ) -> tuple[list[CutEdge], list[CutEdge]]:
        """Returns what a stage receives from the one before, and sends to the next."""
        graph, cut = self._costs.graph, self._costs.cut
        is_last = stage == self._costs.config.num_stages - 1
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
