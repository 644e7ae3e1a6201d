"""Two stages exactly, however many ideals there are: branch and bound by least cuts."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import IntArray
from tarantella_pp.partition.solvers.wide.min_cut import least_cut

_EQUAL = 1 - 1e-10
_STEPS = 6


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """The ideals between two, their bound, and where to branch."""

    bound: float
    inside: NDArray[np.bool_]
    outside: NDArray[np.bool_]
    pivot: int


class TwoStages:
    """The best cut of a graph in two.

    With W the work of an ideal, P its cut and T all work, the larger load is at least
    `P + m W + (1 - m) (T - W)` for every m in 0..1: a least cut with a price on the nodes. The
    best m leaves a gap between an ideal too light and one too heavy; a node that only the heavy
    one holds is put in, or left out, and both cases are bounded again.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        resource = instance.objective
        self._work = resource.scale[0] * (resource.fixed + resource.factor[0] * resource.held)
        self._touch = resource.scale[0] * resource.terms.touch
        self._total = float(self._work.sum())
        n = instance.num_nodes
        self._below = np.eye(n, dtype=bool)
        for node in range(n - 1, -1, -1):
            for after in instance.succs[node]:
                self._below[node] |= self._below[after]
        self._upper = float("inf")
        self._best: NDArray[np.bool_] | None = None

    def run(self, upper: float, deadline: float) -> tuple[float, IntArray | None]:
        """Bounds, and where possible betters, a plan."""
        self._upper = upper
        none = np.zeros(self._instance.num_nodes, bool)
        first = self._examine(none, none)
        count = itertools.count()
        queue = [(first.bound, next(count), first)]
        while queue and time.thread_time() < deadline:
            bound, _, part = heapq.heappop(queue)
            if bound >= self._upper * _EQUAL:
                return self._result(self._upper)
            before = self._below[:, part.pivot]
            after = self._below[part.pivot]
            for inside, outside in (
                (part.inside | before, part.outside),
                (part.inside, part.outside | after),
            ):
                child = self._examine(inside, outside)
                if child.bound < self._upper * _EQUAL:
                    child_bound = max(child.bound, bound)
                    heapq.heappush(queue, (child_bound, next(count), child))
        return self._result(queue[0][0] if queue else self._upper)

    def _result(self, bound: float) -> tuple[float, IntArray | None]:
        better = None if self._best is None else np.where(self._best, 0, 1).astype(np.int64)
        return min(bound, self._upper), better

    def _examine(self, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> _Part:
        """Bounds the ideals between two and finds a node to branch on."""
        low, high = 0.0, 1.0
        bound = 0.0
        light, heavy = inside, ~outside
        fixed = float(self._work[inside].sum())
        middle = 0.5
        for _ in range(_STEPS):
            price = (2 * middle - 1) * self._work
            cost, member = least_cut(self._instance, self._touch, inside, outside, price)
            bound = max(bound, cost + (2 * middle - 1) * fixed + (1 - middle) * self._total)
            self._note(member)
            if bound >= self._upper * _EQUAL:
                break
            if 2 * float(self._work[member].sum()) > self._total:
                heavy, low = member, middle
            else:
                light, high = member, middle
            middle = (low + high) / 2
        between = np.flatnonzero(heavy & ~light)
        if not len(between):
            between = np.flatnonzero(~(inside | outside))
        if not len(between):
            return _Part(float("inf"), inside, outside, -1)
        lead = self._work[between] @ self._below[np.ix_(between, between)]
        pivot = between[int(np.abs(2 * lead - lead.max()).argmin())]
        return _Part(bound, inside, outside, int(pivot))

    def _note(self, member: NDArray[np.bool_]) -> None:
        stages = np.where(member, 0, 1).astype(np.int64)
        value = self._instance.value(stages)
        if value < self._upper:
            self._upper, self._best = value, member
