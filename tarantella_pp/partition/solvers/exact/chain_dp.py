"""Exact partition with communication: the windowed chain DP over ideals."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import TarantellaError
from tarantella_pp.partition.solvers.exact.ideals import unpack
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily, Pricer, numbers_in
from tarantella_pp.partition.solvers.problem.instance import Resource
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray

#: What looking at one ideal costs, whatever follows it, in pairs.
PAIRS_PER_ROW = 1000
#: Pairs priced at a time.
PAIRS_AT_ONCE = 1 << 15

Goal = Literal["bottleneck", "sum", "any"]
Ranges = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Where each of several ranges of ideals begins and ends."""


class OutOfTimeError(TarantellaError):
    """A search was cut off before it proved anything."""


@dataclass(frozen=True, eq=False, slots=True)
class _Front:
    """The ideals that may end one stage, and the best way to each."""

    rows: NDArray[np.intp]
    value: FloatArray
    parent: NDArray[np.intp]
    fresh: NDArray[np.bool_]


class ChainSearch:
    """Shortest chains of ideals from the empty to the full one, by bottleneck or by sum.

    The DP of Tarnawski et al. (NeurIPS 2020) looks at all pairs of ideals. Here a capacity is
    given, and at boundary b only ideals whose own work and cut fit b stages before and S - b
    stages after are kept, and pairs whose difference fits one stage: a few hundred pairs where
    the lattice has 10^8. No chain within the capacity is missed.
    """

    def __init__(self, family: IdealFamily, max_pairs: float = float("inf")) -> None:
        self._family = family
        self._pairs_left = max_pairs
        self._instance = family.instance
        self._pricers = [Pricer.of(self._instance, i) for i in range(len(family.sums))]
        uniform = all(resource.uniform for resource in self._instance.resources)
        self._carry = uniform and not self._instance.strict

    def run(
        self, capacity: float, deadline: float, *, goal: Goal = "bottleneck"
    ) -> tuple[float, IntArray] | None:
        """Finds the best chain whose stages all keep within a capacity."""
        S = self._instance.num_stages
        caps = self._caps(capacity)
        zero = np.zeros(1, np.intp)
        fronts = [_Front(zero, np.zeros(1), zero, np.ones(1, bool))]
        for boundary in range(1, S):
            rows = self._family.window(boundary, caps)
            rows = rows[np.argsort(self._family.sums[0].fixed[rows], kind="stable")]
            front = self._advance(fronts[-1], rows, boundary - 1, caps, deadline, goal)
            if not len(front.rows):
                return None
            fronts.append(front)
        final = self._finish(fronts[-1], caps, goal)
        if final is None:
            return None
        fronts.append(final)
        return float(final.value[0]), self._stages(fronts)

    def pairs(self, capacity: float) -> float:
        """Estimates the work of a run within a capacity, from the ideals at each boundary.

        The first boundaries count most: a search that fails there is over.
        """
        caps = self._caps(capacity)
        sizes = [1, *(len(self._family.window(b, caps)) for b in range(1, len(caps[0])))]
        return sum(a * b / 4.0**i for i, (a, b) in enumerate(itertools.pairwise(sizes)))

    def _caps(self, capacity: float) -> list[FloatArray]:
        caps = [resource.cap.copy() for resource in self._instance.resources]
        caps[0] = np.minimum(caps[0], capacity)
        return caps

    def _finish(self, front: _Front, caps: list[FloatArray], goal: Goal) -> _Front | None:
        """Closes every chain of a front with the last stage, all at once."""
        last, stage = len(self._family) - 1, self._instance.num_stages - 1
        begin = self._family.take(front.rows)
        result, allowed = np.zeros(len(front.rows)), np.ones(len(front.rows), bool)
        for resource, sums, whole, cap in zip(
            self._instance.resources, begin.sums, self._family.sums, caps, strict=True
        ):
            fixed = whole.fixed[last] - sums.fixed + sums.touch + sums.receive
            cost = resource.price(stage, fixed, whole.held[last] - sums.held + sums.receive_held)
            allowed &= cost <= cap[stage]
            wanted = caps[-1] if goal == "sum" else caps[0]
            if goal != "any" and cap is wanted:
                result = cost
        if self._instance.strict:
            allowed &= front.rows != last
        value = np.maximum(front.value, result) if goal == "bottleneck" else front.value + result
        value = np.where(allowed, value, np.inf)
        best = int(value.argmin())
        if not np.isfinite(value[best]):
            return None
        at = np.array([best])
        return _Front(np.array([last]), value[at], at, np.ones(1, bool))

    def _advance(
        self,
        front: _Front,
        rows: NDArray[np.intp],
        stage: int,
        caps: list[FloatArray],
        deadline: float,
        goal: Goal,
    ) -> _Front:
        """Extends every chain of a front by one stage."""
        begin, end = self._family.take(front.rows), self._family.take(rows)
        room = caps[0][stage] / self._instance.objective.scale[stage]
        best = np.full(len(rows), np.inf)
        parent = np.zeros(len(rows), np.intp)
        if self._carry:
            # An empty stage keeps what is known; only better ways there lead on to new ones.
            _, ours, theirs = np.intersect1d(rows, front.rows, return_indices=True)
            best[ours], parent[ours] = front.value[theirs], theirs
        known = best.copy()
        for starts, ranges in self._blocks(begin, np.flatnonzero(front.fresh), end, room):
            if time.thread_time() > deadline:
                raise OutOfTimeError("The chain search ran out of time.")
            wanted = np.isinf(best) if goal == "any" else None
            at, to = self._near(begin, starts, end, ranges, room, wanted)
            cost = self._cost(begin, at, end, to, stage, caps, goal)
            before = front.value[at]
            value = np.maximum(before, cost) if goal == "bottleneck" else before + cost
            better = np.flatnonzero(value < best[to])
            # Of each end's best ways the first.
            better = better[np.lexsort((value[better], to[better]))]
            better = better[np.flatnonzero(np.diff(to[better], prepend=-1))]
            best[to[better]], parent[to[better]] = value[better], at[better]
        kept = np.flatnonzero(np.isfinite(best))
        fresh = best < known if self._carry else np.ones(len(rows), bool)
        return _Front(rows[kept], best[kept], parent[kept], fresh[kept])

    def _blocks(
        self,
        begin: IdealFamily,
        starts: NDArray[np.intp],
        end: IdealFamily,
        room: float,
    ) -> Iterator[tuple[NDArray[np.intp], Ranges]]:
        """Yields ideals that begin a stage, and the ranges in which it may end, some at a time."""
        at, fixed = begin.sums[0].fixed[starts], end.sums[0].fixed
        slack = 1e-9 * np.abs(at)
        low = np.searchsorted(fixed, at - slack)
        high = np.searchsorted(fixed, at + room + slack, "right")
        done, sizes = 0, PAIRS_PER_ROW + high - low
        pairs = np.cumsum(high - low)
        while done < len(starts):
            most = (pairs[done - 1] if done else 0) + PAIRS_AT_ONCE
            until = max(done + 1, int(np.searchsorted(pairs, most, "right")))
            block = slice(done, until)
            if self._pairs_left < sizes[done : until - 1].sum():
                raise OutOfTimeError("The chain search ran out of pairs.")
            self._pairs_left -= int(sizes[block].sum())
            yield starts[block], (low[block], high[block])
            done = until

    def _near(
        self,
        begin: IdealFamily,
        starts: NDArray[np.intp],
        end: IdealFamily,
        ranges: Ranges,
        room: float,
        wanted: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Lists the pairs of ideals that contain each other and may be a stage apart."""
        which, to = numbers_in(*ranges)
        at = starts[which]
        if wanted is not None:
            at, to = at[wanted[to]], to[wanted[to]]
        first, last = begin.sums[0], end.sums[0]
        # A tensor cut on one side only is paid in full.
        jump = np.abs(last.touch[to] - first.touch[at])
        slack = 1e-9 * np.abs(first.fixed[at])
        within = last.fixed[to] - first.fixed[at] + jump <= room + slack
        at, to = at[within], to[within]
        if not len(at):
            return at, to
        ours, theirs = begin.words[:, starts], end.words[:, to.min() : to.max() + 1]
        missing = np.bitwise_or.reduce(ours, axis=1) & ~np.bitwise_and.reduce(theirs, axis=1)
        for word in np.flatnonzero(missing):
            needed = begin.words[word, at]
            inside = (end.words[word, to] & needed) == needed
            at, to = at[inside], to[inside]
        if self._instance.strict:
            same = np.flatnonzero(last.fixed[to] == first.fixed[at])
            same = same[(begin.words[:, at[same]] == end.words[:, to[same]]).all(axis=0)]
            at, to = np.delete(at, same), np.delete(to, same)
        return at, to

    def _cost(
        self,
        begin: IdealFamily,
        at: NDArray[np.intp],
        end: IdealFamily,
        to: NDArray[np.intp],
        stage: int,
        caps: list[FloatArray],
        goal: Goal,
    ) -> FloatArray:
        """Prices the stages; infinite where one is above a cap."""
        result = np.zeros(len(at))
        allowed = np.ones(len(at), bool)
        for pricer, cap in zip(self._pricers, caps, strict=True):
            resource: Resource = pricer.resource
            fixed, held = pricer.stages(begin, at, end, to)
            cost = resource.price(stage, fixed, held)
            allowed &= cost <= cap[stage]
            if goal != "any" and pricer.index == (len(caps) - 1 if goal == "sum" else 0):
                result = cost
        return np.where(allowed, result, np.inf)

    def _stages(self, fronts: list[_Front]) -> IntArray:
        n = self._instance.num_nodes
        stages = np.full(n, -1, np.int64)
        at = 0
        for boundary in range(len(fronts) - 1, 0, -1):
            at = int(fronts[boundary].parent[at])
            row = fronts[boundary - 1].rows[at]
            outside = unpack(self._family.words[:, row : row + 1], n)[:, 0] == 0
            stages[outside & (stages < 0)] = boundary - 1
        return stages
