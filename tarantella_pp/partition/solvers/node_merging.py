"""Joining and dropping nodes that cost nothing, without changing the optimum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    IntArray,
    Problem,
)

#: Reachability is kept as one bit set per node; beyond this many nodes only lone neighbours join.
REACH_LIMIT = 8000


class MergedCosts:
    """A resource before numbering: costs on original nodes, tensors as pin sets."""

    def __init__(self, problem: Problem, fixed: FloatArray, held: FloatArray) -> None:
        S = problem.num_stages
        self.fixed, self.held = fixed, held
        self.factor, self.scale, self.cap = problem.flight, np.ones(S), np.full(S, np.inf)
        self.tensors: list[tuple[tuple[int, ...], int, float, float, float]] = []


class NodeMerger:
    """Shrinks a graph by moving nodes without cost to a neighbour, or leaving them out.

    A node v without cost may always share the stage of a neighbour w when the other nodes before
    it (after it) come before (after) w as well, and when every tensor of v also touches w: the
    set of stages that such a tensor touches can only shrink. Tensors of v that do not touch w may
    then cost `sum(touch)` more on w's stage, which is free where the tensors between just v and
    w, no longer cut, cost at least as much. The same reduction (of leaves) brings the GNMT graphs
    of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators"
    (NeurIPS 2020), within reach.
    """

    def __init__(
        self, owner: IntArray, edges: IntArray, drafts: Sequence[MergedCosts], *, strict: bool
    ) -> None:
        self.owner = owner.copy()
        self.drafts = drafts
        self.alive = set(owner.tolist())
        self.preds: dict[int, set[int]] = {node: set() for node in self.alive}
        self.succs: dict[int, set[int]] = {node: set() for node in self.alive}
        for before, after in owner[edges].tolist():
            if before != after:
                self.preds[after].add(before)
                self.succs[before].add(after)
        sizes = np.bincount(owner, minlength=len(owner))
        self._single = sizes == 1
        self._strict = strict
        self._free = self._costless()
        self._load_tensors()

    def _costless(self) -> list[int]:
        if self._strict:
            return []
        costs = np.zeros(len(self.owner))
        for draft in self.drafts:
            costs += np.bincount(self.owner, draft.fixed + draft.held, len(self.owner))
        return [node for node in sorted(self.alive) if costs[node] == 0]

    def _load_tensors(self) -> None:
        self._pins: list[set[int]] = []
        self._producer: list[int] = []
        self._touch: list[float] = []
        self._received: list[bool] = []
        self._of: dict[int, set[int]] = {node: set() for node in self.alive}
        for draft in self.drafts if self._free else ():
            for nodes, producer, touch, receive, held in draft.tensors:
                pins = {int(self.owner[node]) for node in nodes}
                if len(pins) > 1:
                    for pin in pins:
                        self._of[pin].add(len(self._pins))
                    self._pins.append(pins)
                    self._producer.append(int(self.owner[producer]) if producer >= 0 else -1)
                    self._touch.append(touch)
                    self._received.append(receive + held > 0)

    def run(self) -> None:
        """Joins and drops until nothing changes."""
        reach = self._reach()
        waiting = list(self._free)
        while waiting:
            again: list[int] = []
            for node in waiting:
                if self._drop(node):
                    continue
                target = self._target(node, reach)
                if target is None:
                    again.append(node)
                else:
                    self._join(node, target)
            if len(again) == len(waiting):
                break
            waiting = again

    def owners(self) -> IntArray:
        """Returns for each original node the node it became part of, -1 where left out."""
        owner = self.owner.tolist()
        for node in range(len(owner)):
            root = node
            while root >= 0 and owner[root] != root:
                root = owner[root]
            owner[node] = root
        return np.array(owner, dtype=np.int64)

    def _reach(self) -> dict[int, int] | None:
        """Returns each node's descendants as a bit set, itself included."""
        if not self._free or len(self.owner) > REACH_LIMIT:
            return None
        below: dict[int, int] = {}
        waiting = {node: len(self.succs[node]) for node in self.alive}
        ready = [node for node, count in waiting.items() if count == 0]
        while ready:
            node = ready.pop()
            bits = 1 << node
            for after in self.succs[node]:
                bits |= below[after]
            below[node] = bits
            for before in self.preds[node]:
                waiting[before] -= 1
                if waiting[before] == 0:
                    ready.append(before)
        return below

    def _drop(self, node: int) -> bool:
        before, after = self.preds[node], self.succs[node]
        few = len(before) * len(after) <= max(4, len(before) + len(after))
        if self._of[node] or not self._single[node] or not few or len(self.alive) == 1:
            return False
        for b in before:
            self.succs[b].discard(node)
            self.succs[b] |= after
        for a in after:
            self.preds[a].discard(node)
            self.preds[a] |= before
        self.alive.discard(node)
        self.owner[node] = -1
        return True

    def _target(self, node: int, reach: dict[int, int] | None) -> int | None:
        before, after = self.preds[node], self.succs[node]
        for target in sorted(before):
            if self._after_all(target, before, reach) and self._cheap(node, target, earlier=True):
                return target
        for target in sorted(after):
            if self._before_all(target, after, reach) and self._cheap(node, target, earlier=False):
                return target
        return None

    def _after_all(self, target: int, others: set[int], reach: dict[int, int] | None) -> bool:
        if len(others) == 1:
            return True
        return reach is not None and all(reach[other] >> target & 1 for other in others)

    def _before_all(self, target: int, others: set[int], reach: dict[int, int] | None) -> bool:
        if len(others) == 1:
            return True
        return reach is not None and all(reach[target] >> other & 1 for other in others)

    def _cheap(self, node: int, target: int, *, earlier: bool) -> bool:
        loose = gain = 0.0
        for t in self._of[node]:
            if target not in self._pins[t]:
                if self._received[t]:
                    return False
                loose += self._touch[t]
            elif earlier and self._received[t] and self._producer[t] == node:
                return False
            elif len(self._pins[t]) == 2:
                gain += self._touch[t]
        return loose <= gain

    def _join(self, node: int, target: int) -> None:
        for before in self.preds.pop(node):
            self.succs[before].discard(node)
            if before != target:
                self.succs[before].add(target)
                self.preds[target].add(before)
        for after in self.succs.pop(node):
            self.preds[after].discard(node)
            if after != target:
                self.preds[after].add(target)
                self.succs[target].add(after)
        for t in self._of.pop(node):
            pins = self._pins[t]
            pins.discard(node)
            pins.add(target)
            self._of[target].add(t)
            if self._producer[t] == node:
                self._producer[t] = target
            if len(pins) == 1:
                self._of[target].discard(t)
        self.alive.discard(node)
        self._single[target] = False
        self.owner[node] = target
