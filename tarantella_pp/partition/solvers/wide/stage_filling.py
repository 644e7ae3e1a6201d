"""Plans that fill one stage after the other, with many plans at a time."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.ideals import resource_sums
from tarantella_pp.partition.solvers.exact.orders import depth_first_order, random_order
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.stage_sweep import Members, StageSweep
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

#: Ideals kept at each boundary, and partial stages kept at a time.
BEAM = 20
PARTIAL = 500
#: Capacities tried.
TRIES = 4
#: Share of the distance from the bound that is tried first, but no more than so much of the bound.
FIRST = 0.3
NEAR = 0.02
Way = tuple[Members, NDArray[np.intp]]
"""Ideals at a boundary, shape `(nodes, ideals)`, and the one before it that each comes from."""


class StageFilling:
    """Fills stages up to a capacity from the first to the last, and keeps the best of many ways.

    After each stage those ways are kept that leave least to the later ones: their nodes, and what
    they have to receive at least. Where the first operations are large, and can be put together in
    few ways only, all of these are there, and the many small ones behind them fill what is left
    (bounded dynamic programming: Bautista and Pereira, "A dynamic programming based heuristic for
    the assembly line balancing problem", EJOR 194, 2009). Deterministic but for the moment at which
    time runs out.
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._random = np.random.default_rng(0)
        self._sweep = StageSweep(instance, closure)
        self._orders = [depth_first_order(instance, backward=way) for way in (False, True)]

    def improve(
        self, stages: IntArray | None, lower: float, gap: float, deadline: float
    ) -> tuple[float, IntArray | None]:
        """Looks for a better plan."""
        value = np.inf if stages is None else self._instance.value(stages)
        failed, step = lower, min(NEAR * lower, FIRST * (value - lower))
        for _ in range(TRIES):
            if (
                value <= max(lower * (1 + gap), failed * (1 + 1e-4))
                or time.thread_time() > deadline
            ):
                break
            capacity = failed + min(step, (value - failed) / 2)
            found, proven = self.fill(capacity, deadline)
            reached = np.inf if found is None else self._instance.value(found)
            if reached < value:
                value, stages, step = reached, found, np.inf
            else:
                failed, step = capacity, 2 * step
                lower = capacity if proven else lower
        return lower, stages

    def fill(self, capacity: float, deadline: float) -> tuple[IntArray | None, bool]:
        """Fills stages within a capacity."""
        instance, S = self._instance, self._instance.num_stages
        member, complete = np.zeros((instance.num_nodes, 1), np.uint8), True
        ways: list[Way] = [(member, np.zeros(1, np.intp))]
        for stage in range(S - 1):
            if time.thread_time() > deadline:
                return None, False
            order = self._order()
            ends = self._sweep.run(member, stage, capacity, order, PARTIAL, self._random)
            complete &= ends.complete
            rest, fits = self._rest(ends.member, stage + 1, capacity)
            if instance.strict:
                fits &= (ends.member != member[:, ends.parent]).any(axis=0)
                fits &= (ends.member == 0).sum(axis=0) >= S - 1 - stage
            rows = np.flatnonzero(fits)
            if not len(rows):
                return None, complete
            rows = rows[np.argsort(rest[rows], kind="stable")]
            complete &= len(rows) <= BEAM
            member = ends.member[:, rows[:BEAM]]
            ways.append((member, ends.parent[rows[:BEAM]]))
        return self._best(ways), False

    def _order(self) -> IntArray:
        if self._random.random() < 0.5:
            return random_order(self._instance, self._random)
        return self._orders[int(self._random.integers(2))]

    def _rest(
        self, member: Members, first: int, capacity: float
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Returns what stages from one on have to hold and receive, and whether that may fit."""
        resource = self._instance.objective
        later, caps = slice(first, None), np.minimum(resource.cap, capacity)
        sums = resource_sums(resource, member)
        fixed = resource.fixed.sum() - sums.fixed + sums.receive
        held = resource.held.sum() - sums.held + sums.receive_held
        factor = resource.factor[later]
        usual = len(factor) / (1 / factor).sum() if factor.min() > 0 else factor.mean()
        return fixed + usual * held, resource.fits(later, caps, fixed, held)

    def _best(self, ways: list[Way]) -> IntArray | None:
        """Returns the best of the plans that are left, if one is a plan."""
        plans = [self._stages(ways, row) for row in range(ways[-1][0].shape[1])]
        best = min(plans, key=self._instance.value)
        return best if np.isfinite(self._instance.value(best)) else None

    def _stages(self, ways: list[Way], row: int) -> IntArray:
        stages: IntArray = np.full(self._instance.num_nodes, len(ways) - 1, np.int64)
        for boundary in range(len(ways) - 1, 0, -1):
            member, parent = ways[boundary]
            stages[member[:, row] == 1] = boundary - 1
            row = int(parent[row])
        return stages
