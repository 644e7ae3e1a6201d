"""The ideals that may end a stage which begins at one of several others, listed node by node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.ideals import Words, pack
from tarantella_pp.partition.solvers.problem.instance import ANY, INPUT, Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
#: How much more than luck the load of a stage counts where ideals are too many.
FULL_FIRST = 4.0
Members = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class Ends:
    """Ideals that may end a stage.

    Attributes:
        member: Their membership, shape `(nodes, ideals)`.
        parent: Number of the ideal at which the stage begins, shape `(ideals,)`.
        complete: Whether none is missing.
    """

    member: Members
    parent: NDArray[np.intp]
    complete: bool


class StageSweep:
    """Lists what one stage can hold within a capacity, whichever of several ideals it begins at.

    Node by node, each partial stage goes on without the node and, where its predecessors are in
    and it fits, with it. Of two with the same work that agree on every node which a later one
    reads, the one with less load is kept; of too many, the fullest, and some by luck.

    Args:
        instance: An instance whose tensors cost the stages that receive them, if any.
        closure: What comes before each node.
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._reach = closure.reach
        self._received: list[list[int]] = [[] for _ in range(instance.num_nodes)]
        terms = instance.objective.terms
        paid = (terms.producer != INPUT) & (terms.receive + terms.receive_held > 0)
        for tensor in np.flatnonzero(paid).tolist():
            for pin in terms.pins[tensor]:
                self._received[pin].append(tensor)

    def run(
        self,
        begin: Members,
        stage: int,
        capacity: float,
        order: IntArray,
        limit: int,
        random: np.random.Generator,
    ) -> Ends:
        """Lists the ends of a stage.

        Args:
            begin: Membership of the ideals at which it may begin, shape `(nodes, ideals)`.
            stage: The stage.
            capacity: The most it may cost.
            order: A topological order of the nodes.
            limit: Ideals kept at a time.
            random: Picks some of too many.
        """
        resource = self._instance.objective
        cost = resource.scale[stage] * (resource.fixed + resource.factor[stage] * resource.held)
        most = min(capacity, resource.cap[stage]) * (1 + 1e-12)
        free = self._free(begin, cost, most, order)
        place = np.full(self._instance.num_nodes, -1, np.int64)
        place[free] = np.arange(len(free))
        last = self._last(free, place)
        words = pack(begin[free].astype(bool))
        begun, parent = words, np.arange(begin.shape[1])
        load, work, complete = np.zeros(len(parent)), cost @ begin, True
        total = float(cost.sum())
        unit = 2.0**40 / total if total > 0 else 0.0
        for at, node in enumerate(free.tolist()):
            fits = (begin[node, parent] == 0) & (load + cost[node] <= most)
            fits &= _holds(words, _mask(self._instance.preds[node], place, len(words)))
            new = np.flatnonzero(fits)
            if not len(new):
                continue
            more = cost[node] + self._receives(node, begin, begun, words, new, parent, place, stage)
            kept = load[new] + more <= most
            new, more = new[kept], more[kept]
            grown = words[:, new]
            grown[at >> 6] |= np.uint64(1 << (at & 63))
            words = np.concatenate([words, grown], axis=1)
            load = np.concatenate([load, load[new] + more])
            work = np.concatenate([work, work[new] + cost[node]])
            parent = np.concatenate([parent, parent[new]])
            read = np.zeros(64 * len(words), bool)
            read[: at + 1] = last[: at + 1] > at
            future = words & np.packbits(read, bitorder="little").view(np.uint64)[:, None]
            rows = _distinct(future, np.rint(work * unit).astype(np.int64), load)
            complete &= len(rows) == len(load)
            if len(rows) > limit:
                rank = random.random(len(rows)) - FULL_FIRST * load[rows] / max(most, 1e-300)
                rows, complete = rows[np.argpartition(rank, limit)[:limit]], False
            words, load, work, parent = words[:, rows], load[rows], work[rows], parent[rows]
        member = begin[:, parent].copy()
        for at, node in enumerate(free.tolist()):
            member[node] = (words[at >> 6] >> np.uint64(at & 63)) & np.uint64(1)
        return Ends(member, parent, complete)

    def _free(self, begin: Members, cost: FloatArray, most: float, order: IntArray) -> IntArray:
        """Returns the nodes that the stage may hold: what they need that is nowhere yet fits."""
        everywhere = begin.min(axis=1) == 1
        need = (cost * (begin.max(axis=1) == 0)) @ self._reach
        able = everywhere | (need <= most * (1 + 1e-9))
        for node in order[able[order] & ~everywhere[order]].tolist():
            able[node] = all(able[before] for before in self._instance.preds[node])
        free: IntArray = order[able[order] & ~everywhere[order]]
        return free

    def _last(self, free: IntArray, place: IntArray) -> IntArray:
        """Returns the place of the last node that reads each free one."""
        last: IntArray = np.full(len(free), -1, np.int64)
        tensors: dict[int, int] = {}
        for at, node in enumerate(free.tolist()):
            for before in self._instance.preds[node]:
                if place[before] >= 0:
                    last[place[before]] = at
            tensors.update(dict.fromkeys(self._received[node], at))
        for tensor, at in tensors.items():
            for pin in self._instance.objective.terms.pins[tensor]:
                if place[pin] >= 0:
                    last[place[pin]] = max(last[place[pin]], at)
        return last

    def _receives(
        self,
        node: int,
        begin: Members,
        begun: Words,
        words: Words,
        rows: NDArray[np.intp],
        parent: NDArray[np.intp],
        place: IntArray,
        stage: int,
    ) -> FloatArray:
        """Returns what partial stages receive for one more node, but for what they have."""
        resource = self._instance.objective
        terms, total = resource.terms, np.zeros(len(rows))
        for tensor in self._received[node]:
            producer, pins = int(terms.producer[tensor]), terms.pins[tensor]
            makers = list(pins) if producer == ANY else [producer]
            made = begin[makers].max(axis=0) == 1
            live = made[parent[rows]]
            if producer != node and live.any():
                mask = _mask(pins, place, len(words))[:, None]
                got = (words[:, rows] & ~begun[:, parent[rows]] & mask).any(axis=0)
                held = resource.factor[stage] * terms.receive_held[tensor]
                total += resource.scale[stage] * (terms.receive[tensor] + held) * (live & ~got)
        return total


def _mask(nodes: tuple[int, ...], place: IntArray, width: int) -> Words:
    mask = [0] * width
    for node in nodes:
        at = int(place[node])
        if at >= 0:
            mask[at >> 6] |= 1 << (at & 63)
    return np.array(mask, dtype=np.uint64)


def _holds(words: Words, mask: Words) -> NDArray[np.bool_]:
    holds = np.ones(words.shape[1], bool)
    for word in np.flatnonzero(mask).tolist():
        holds &= (words[word] & mask[word]) == mask[word]
    return holds


def _distinct(future: Words, work: IntArray, load: FloatArray) -> NDArray[np.intp]:
    """Picks of each future and work the row with the least load."""
    key = work.view(np.uint64) * _ODD
    for word in future:
        key = (key ^ (key >> _SHIFT) ^ word) * _ODD
    order = np.lexsort((load, key))
    # Rows of equal key that differ are very rare, and lost: no plan is a wrong one for that.
    first: NDArray[np.bool_] = np.concatenate([[True], key[order[1:]] != key[order[:-1]]])
    rows: NDArray[np.intp] = order[first]
    return rows
