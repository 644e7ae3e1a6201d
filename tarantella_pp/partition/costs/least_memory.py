"""The stages whose largest needs the least memory, with all that is there for a moment.

Solvers add up state and activations. What a stage needs besides does not add up: gradients on their
way back, temporaries of the update, messages that wait. Here stages are priced whole::

    nodes before a boundary     {}      {a}     {a b}   {a b c}  {a b c d}
    stage 0                     |--------------->|
    stage 1                                      |------->|
    stage 2                                               |-------->|

A plan is a path over such sets; its value is that of its dearest stage. State and activations,
which are quick to sum up, tell of most stages that they are too dear, and these are never priced.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.partition.solvers.exact.ideals import Preds, ideals_of, unpack

MOST_BOUNDARIES = 2500
"""Sets of nodes before a boundary that are listed at most."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """What was found.

    Attributes:
        assignment: Stage of each node; `None` where no plan needs less than what is known.
        value: Bytes of the largest stage; of the known plan where there is none that needs less.
        lower_bound: Bytes that the largest stage of every plan needs; 0 where not all were looked
            at.
    """

    assignment: tuple[int, ...] | None
    value: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class StageSums:
    """State and activations of each node, which add up to what a stage has at the least.

    Attributes:
        static: Bytes whatever the number of micro-batches, shape `(nodes,)`.
        held: Bytes of each micro-batch, shape `(nodes,)`.
        in_flight: Micro-batches that each stage holds, shape `(stages,)`.
    """

    static: Array
    held: Array
    in_flight: Array


def least_memory(
    costs: StageCostModel,
    sums: StageSums,
    in_flight: Sequence[int],
    repeats: Mapping[int, int],
    known: Sequence[int],
    below: float,
    limits: Sequence[float],
) -> LeastMemory:
    """Finds the stages whose largest needs the least memory.

    A stage does not know from how many others its messages come, and waits for the largest of each:
    it is priced as if they were from one, and for the bound as if each were from another.
    Optimizers that are shared out over replicas are taken as the known plan has them, without a
    bound.
    """
    boundaries = BoundarySets.of(costs.graph, known)
    pricing = _Pricing(costs, boundaries, in_flight, repeats, known)
    floors = _Floors(boundaries, sums, limits)
    proves = boundaries.complete and costs.shards == 1
    best, least = None, 0.0
    for kind in ("usual", "least") if proves else ("usual",):
        least, path = _shortest(pricing, kind, floors, below, limits)
        if path is None:
            continue
        assignment = boundaries.assignment(path)
        stages = costs.stages(assignment, in_flight, repeats)
        sizes = [stage.memory_bytes for stage in stages]
        if max(sizes) < below and all(map(operator.le, sizes, limits)):
            best, below = assignment, max(sizes)
    return LeastMemory(best, below, least if proves else 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class BoundarySets:
    """Where stages may begin and end.

    Attributes:
        before: Which nodes lie before each boundary, shape `(boundaries, nodes)`; none first, all
            last.
        sets: The same as bits.
        complete: Whether these are all there are.
    """

    before: npt.NDArray[np.bool_]
    sets: Sequence[int]
    complete: bool

    @classmethod
    def of(cls, graph: LayerGraph, known: Sequence[int]) -> BoundarySets:
        """Lists the boundaries of a graph, or if they are too many those in line with a plan."""
        lattice, count = ideals_of(comes_before(graph), MOST_BOUNDARIES), len(known)
        if lattice is None:
            before = np.zeros((count + 1, count), bool)
            before[:, np.argsort(known, kind="stable")] = np.tri(count + 1, count, -1)
        else:
            before = unpack(lattice.words, count).T.astype(bool)
        for group in map(list, graph.groups):
            inside = before[:, group]
            before = before[inside.all(axis=1) == inside.any(axis=1)]
        before = before[np.argsort(before.sum(axis=1), kind="stable")]
        packed = np.packbits(before, axis=1, bitorder="little")
        sets = [int.from_bytes(row.tobytes(), "little") for row in packed]
        return cls(before, sets, lattice is not None)

    def nodes(self, begin: int, end: int) -> list[int]:
        """Returns the nodes between two boundaries, ascending."""
        found: list[int] = np.flatnonzero(self.before[end] & ~self.before[begin]).tolist()
        return found

    def assignment(self, path: Sequence[int]) -> tuple[int, ...]:
        """Returns the stage of each node."""
        return tuple((len(path) - self.before[list(path)].sum(axis=0)).tolist())


def comes_before(graph: LayerGraph) -> Preds:
    """Returns what comes before each node: what it reads, and what trains its variables.

    The first node that has a variable trains it, and others come no earlier.
    """
    trains: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        before = {graph.tensors[tensor].producer for tensor in node.inputs}
        before |= {trains.setdefault(weight, node.id) for weight in node.weights}
        found.append(tuple(sorted(one for one in before if one not in {None, node.id})))
    return tuple(found)


class _Floors:
    """What stages between two boundaries have at the least, made when asked for: it is large."""

    def __init__(self, boundaries: BoundarySets, sums: StageSums, limits: Sequence[float]) -> None:
        table = boundaries.before.astype(np.float32)
        self._never = table @ (1 - table).T > 0  # it would end before it begins
        np.fill_diagonal(self._never, val=True)
        self._sums = [
            boundaries.before @ (sums.static + held * sums.held) for held in sums.in_flight
        ]
        self._limits = limits

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, stage: int) -> Array:
        """Returns the bytes of a stage, infinitely many if it cannot be, by boundaries."""
        before = self._sums[stage]
        floors: Array = before[None, :] - before[:, None]
        floors[self._never | (floors > self._limits[stage])] = np.inf
        return floors


class Price(TypedDict):
    """Bytes of a stage between two boundaries.

    Attributes:
        usual: If it exchanges messages with its neighbours.
        least: At the least, wherever its messages come from and go to.
    """

    usual: float
    least: float


class _Pricing:
    """Prices stages between two boundaries."""

    def __init__(
        self,
        costs: StageCostModel,
        boundaries: BoundarySets,
        in_flight: Sequence[int],
        repeats: Mapping[int, int],
        known: Sequence[int],
    ) -> None:
        self._costs, self._boundaries = costs, boundaries
        self._in_flight, self._repeats = in_flight, repeats
        graph = costs.graph
        self._replicas = costs.replicas(graph.users(known))
        self._summed = costs.reduction_bytes(1.0 if costs.shards == 1 else None)
        self._outputs = set(graph.outputs)
        self._known: dict[tuple[int, int, int], Price] = {}
        self._readers = [sum(1 << node for node in set(t.consumers)) for t in graph.tensors]
        self._users = [0] * len(graph.weights)
        for node in graph.nodes:
            for weight in node.weights:
                self._users[weight] |= 1 << node.id

    def __call__(self, begin: int, end: int, stage: int) -> Price:
        """Prices a stage."""
        if (begin, end, stage) not in self._known:
            self._known[begin, end, stage] = self._price(begin, end, stage)
        return self._known[begin, end, stage]

    def _price(self, begin: int, end: int, stage: int) -> Price:
        costs, last = self._costs, len(self._in_flight) - 1
        nodes = self._boundaries.nodes(begin, end)
        users = self._stages_of_weights(nodes, begin, end, stage)
        received, sent = self._messages(nodes, end, stage, last)
        priced = costs.stage(
            nodes, stage, last, self._in_flight[stage], (*received, *sent), users,
            self._repeats.get(stage, 0), self._replicas,
        )  # fmt: skip
        size = priced.memory_bytes + sum(self._summed[w] for w in users if users[w][0] == stage)
        wire = costs.wire_dtype
        arriving = [[cut.sent_bytes(wire) + cut.mask_bytes for cut in received]]
        arriving += [[cut.sent_bytes(wire) for cut in sent if cut.has_gradient]]
        together = [sum(sizes) for sizes in arriving]
        # From one stage only where there is no other.
        alone = [stage == 1, stage == last - 1]
        apart = [
            all_ if one else max(sizes, default=0)
            for all_, sizes, one in zip(together, arriving, alone, strict=True)
        ]
        return {"usual": size, "least": size - max(together) + max(apart)}

    def _stages_of_weights(
        self, nodes: Sequence[int], begin: int, end: int, stage: int
    ) -> dict[int, tuple[int, ...]]:
        """Returns the stages that use each variable of a stage, as if there were three."""
        sets, found = self._boundaries.sets, {}
        for node in nodes:
            for weight in self._costs.graph.nodes[node].weights:
                used = self._users[weight]
                earlier, later = used & sets[begin], used & ~sets[end]
                found[weight] = (*[stage - 1] * bool(earlier), stage, *[stage + 1] * bool(later))
        return found

    def _messages(
        self, nodes: Sequence[int], end: int, stage: int, last: int
    ) -> tuple[list[CutEdge], list[CutEdge]]:
        """Returns what a stage receives from the one before, and sends to the next."""
        graph, cut, own = self._costs.graph, self._costs.cut, set(nodes)
        read = {tensor for node in nodes for tensor in graph.nodes[node].inputs}
        if stage == last:
            read |= self._outputs
        given = [graph.tensors[tensor] for tensor in sorted(read)]
        beyond = ~self._boundaries.sets[end]
        made = [t for node in nodes for t in graph.nodes[node].outputs]
        received = [
            cut(one, stage - 1, (stage,)) for one in given if one.producer not in {None, *own}
        ]
        sent = [
            cut(graph.tensors[t], stage, (stage + 1,))
            for t in made
            if self._readers[t] & beyond or (t in self._outputs and stage != last)
        ]
        return received, sent


def _shortest(
    pricing: _Pricing,
    kind: Literal["usual", "least"],
    floors: _Floors,
    below: float,
    limits: Sequence[float],
) -> tuple[float, list[int] | None]:
    """Finds the path whose dearest stage is the cheapest, if that is below what is known."""
    ahead = _floors_ahead(floors)
    reached = np.full(len(ahead[0]), np.inf)
    reached[0] = 0.0
    came: list[npt.NDArray[np.int64]] = []
    for stage in range(len(floors)):
        floor = floors[stage]
        behind = np.full(len(reached), np.inf)
        origin = np.zeros(len(reached), np.int64)
        for end in np.flatnonzero(ahead[stage] < below).tolist():
            least = np.maximum(reached, floor[:, end])
            best = below
            for begin in np.argsort(least, kind="stable").tolist():
                # A path is as dear as what still has to come, however cheap it was.
                if least[begin] >= best or best <= ahead[stage][end]:
                    break
                bytes_ = pricing(begin, end, stage)[kind]
                if bytes_ <= limits[stage] and (found := max(reached[begin], bytes_)) < best:
                    best = behind[end] = found
                    origin[end] = begin
        reached = behind
        came.append(origin)
    if not np.isfinite(reached[-1]):
        return below, None
    path = [len(reached) - 1]
    for origin in reversed(came[1:]):
        path.append(int(origin[path[-1]]))
    return float(reached[-1]), path[::-1]


def _floors_ahead(floors: _Floors) -> list[Array]:
    """Returns what the dearest stage behind each boundary of each stage has at the least."""
    nothing_left = np.full(len(floors[0]), np.inf)
    nothing_left[-1] = 0.0
    ahead = [nothing_left]
    for stage in range(len(floors) - 1, 0, -1):
        ahead.append(np.maximum(floors[stage], ahead[-1][None, :]).min(axis=1))
    return ahead[::-1]
