"""The ideals that may end a stage which begins at one of several others, listed node by node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.ideals import Words, pack
from tarantella_pp.partition.solvers.problem.instance import ANY, INPUT, Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.ideal_sweep import FreeNodes, distinct, holds
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

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
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._reach = closure.reach
        self._costs = instance.objective.node_costs()
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
        """Lists the ends of a stage."""
        resource = self._instance.objective
        cost = self._costs[stage]
        most = min(capacity, resource.cap[stage]) * (1 + 1e-12)
        nodes = self._free(begin, cost, most, order)
        free = self._chosen(nodes)
        words = pack(begin[nodes].astype(bool))
        begun, parent = words, np.arange(begin.shape[1])
        load, work, complete = np.zeros(len(parent)), cost @ begin, True
        total = float(cost.sum())
        unit = 2.0**40 / total if total > 0 else 0.0
        for at, node in enumerate(nodes.tolist()):
            fits = (begin[node, parent] == 0) & (load + cost[node] <= most)
            new = np.flatnonzero(fits & holds(words, free.preds[at]))
            if not len(new):
                continue
            more = np.full(len(new), cost[node])
            if self._received[node]:
                origin = parent[new]
                own = words[:, new] & ~begun[:, origin]
                more += self._receives(node, begin, origin, own, free, stage)
            kept = load[new] + more <= most
            new, more = new[kept], more[kept]
            grown = words[:, new]
            grown[at >> 6] |= np.uint64(1 << (at & 63))
            words = np.concatenate([words, grown], axis=1)
            load = np.concatenate([load, load[new] + more])
            work = np.concatenate([work, work[new] + cost[node]])
            parent = np.concatenate([parent, parent[new]])
            future = words & free.frontier(at)[:, None]
            rows = distinct(future, np.rint(work * unit).astype(np.int64), load)
            complete &= len(rows) == len(load)
            if len(rows) > limit:
                rank = random.random(len(rows)) - FULL_FIRST * load[rows] / max(most, 1e-300)
                rows, complete = rows[np.argpartition(rank, limit)[:limit]], False
            words, load, work, parent = words[:, rows], load[rows], work[rows], parent[rows]
        member = begin[:, parent].copy()
        for at, node in enumerate(nodes.tolist()):
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

    def _chosen(self, nodes: IntArray) -> FreeNodes:
        """Returns free nodes, whose choices depend on those of all that receive the same, too."""
        free = FreeNodes(self._instance, nodes)
        for place, node in enumerate(nodes.tolist()):
            for tensor in self._received[node]:
                free.read(self._instance.objective.terms.pins[tensor], place)
        return free

    def _receives(
        self,
        node: int,
        begin: Members,
        origin: NDArray[np.intp],
        own: Words,
        free: FreeNodes,
        stage: int,
    ) -> FloatArray:
        """Returns what partial stages, of so many own nodes, receive besides for one more."""
        resource = self._instance.objective
        terms, total = resource.terms, np.zeros(len(origin))
        for tensor in self._received[node]:
            producer, pins = int(terms.producer[tensor]), terms.pins[tensor]
            makers = list(pins) if producer == ANY else [producer]
            live = (begin[makers].max(axis=0) == 1)[origin]
            if producer != node and live.any():
                got = (own & free.mask(pins)[:, None]).any(axis=0)
                held = resource.factor[stage] * terms.receive_held[tensor]
                total += resource.scale[stage] * (terms.receive[tensor] + held) * (live & ~got)
        return total
