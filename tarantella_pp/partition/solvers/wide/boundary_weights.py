"""What the first stages of a plan can weigh together, where ideals are too many to list."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.orders import depth_first_order
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.ideal_sweep import (
    IdealRange,
    IdealSweep,
    Swept,
)
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

#: Ideals kept at a time while the weights at a boundary are listed.
MAX_WEIGHTS = 200_000
#: The same while a plan is put together, where a part of them will do.
MAX_CHOICES = 20_000
_MEETS = 1 + 1e-11


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Weights: disjoint ranges, ascending; single weights are ranges of no width."""

    low: FloatArray
    high: FloatArray

    def reach(self, weights: FloatArray, capacity: float) -> FloatArray:
        """Returns those of some weights that are at most a capacity above one of these."""
        if not len(self.low):
            return weights[:0]
        below = np.searchsorted(self.low, weights, "right") - 1
        near = (below >= 0) & (weights - self.high[np.maximum(below, 0)] <= capacity)
        return weights[near]

    def holds(self, weights: FloatArray) -> NDArray[np.bool_]:
        """Tells which of some weights are among these."""
        if not len(self.low):
            return np.zeros(len(weights), bool)
        below = np.searchsorted(self.low, weights, "right") - 1
        held: NDArray[np.bool_] = (below >= 0) & (weights <= self.high[np.maximum(below, 0)])
        return held


class Boundaries:
    """The weights that the first 1, 2, ... stages of a plan can have, of an additive objective.

    A boundary of a plan below a value splits the work into parts that fit the stages before and
    after it, so its ideal lies in a narrow window of work, in which sums of few different costs
    leave gaps. The least capacity with which a chain of such weights leads from nothing to
    everything is a bound; and it says what a plan that meets it must look like.
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._sweep = IdealSweep(instance, instance.objective.node_costs()[0])
        self._unit = self._sweep.unit
        self._total = float(self._sweep.work.sum())
        scale = instance.objective.scale[0] / self._unit
        self._before, self._after = scale * closure.before, scale * closure.after
        self._order = depth_first_order(instance, backward=True)
        self._weights: list[FloatArray | None] = [None] * (instance.num_stages - 1)
        self._failed = [np.inf] * (instance.num_stages - 1)

    def bound(self, lower: float, upper: float, deadline: float) -> float:
        """Raises a bound."""
        S, capacity = self._instance.num_stages, upper / self._unit
        none = np.zeros(self._instance.num_nodes, bool)
        for boundary in range(1, S):
            # Weights below a larger value hold those below a smaller one. Where they were too
            # many, half as wide a window is worth another try.
            half = lower / self._unit + (self._failed[boundary - 1] - lower / self._unit) / 2
            if self._weights[boundary - 1] is None and capacity <= half:
                swept = self._swept(none, boundary, capacity, deadline)
                if swept is not None:
                    self._weights[boundary - 1] = np.unique(swept.work)
                elif time.thread_time() < deadline:
                    self._failed[boundary - 1] = capacity
        low, high = lower / self._unit, capacity
        for _ in range(60):
            if high - low <= 1e-12 * high:
                break
            middle = (low + high) / 2
            last = self._forward(middle, mirrored=False)[-1]
            if len(last.reach(np.array([self._total]), middle)):
                high = middle
            else:
                low = middle
        return max(lower, min(upper, (low - self._sweep.error) * self._unit))

    def _swept(
        self,
        inside: NDArray[np.bool_],
        boundary: int,
        capacity: float,
        deadline: float,
        *,
        random: np.random.Generator | None = None,
        low: float = 0.0,
        high: float = np.inf,
    ) -> Swept | None:
        """Lists ideals that can end the first stages, and hold others."""
        S = self._instance.num_stages
        low = max(low, self._total - (S - boundary) * capacity)
        high = min(high, boundary * capacity)
        slack = 0.5 + self._sweep.error  # the closure's work is not in whole units
        inside = inside | (self._total - self._after < low - slack)
        outside = self._before > high + slack
        if (inside & outside).any():
            return None
        free = ~(inside | outside)
        span = IdealRange(inside, self._order[free[self._order]], low, high)
        limit = MAX_WEIGHTS if random is None else MAX_CHOICES
        return self._sweep.run(span, deadline, limit=limit, random=random)

    def _forward(self, capacity: float, *, mirrored: bool) -> list[_Ranges]:
        """Lists what the first stages can reach, or with `mirrored` the last ones."""
        S, zero = self._instance.num_stages, np.zeros(1)
        ranges = [_Ranges(zero, zero)]
        for boundary in range(1, S):
            least, most = self._total - (S - boundary) * capacity, boundary * capacity
            known = self._weights[S - boundary - 1 if mirrored else boundary - 1]
            before = ranges[-1]
            if known is None:
                low = max(least, float(before.low.min(initial=np.inf)))
                high = min(most, float(before.high.max(initial=-np.inf)) + capacity)
                some = low <= high
                ranges.append(_Ranges(np.array([low])[:some], np.array([high])[:some]))
                continue
            weights = self._total - known[::-1] if mirrored else known
            weights = weights[(weights >= least) & (weights <= most)]
            weights = before.reach(weights, capacity)
            ranges.append(_Ranges(weights, weights))
        return ranges

    def search(
        self,
        value: float,
        stages: IntArray | None,
        lower: float,
        random: np.random.Generator,
        deadline: float,
    ) -> tuple[float, float, IntArray | None]:
        """Improves a plan and its bound by turns."""
        lower = self.bound(lower, value, deadline)
        share = 0.0
        while value > lower * _MEETS and time.thread_time() < deadline:
            # What the bound asks for is tried first, and less from failure to failure.
            assignment = self.dive(lower + share * (value - lower), random, deadline)
            reached = np.inf if assignment is None else self._instance.value(assignment)
            if reached < value:
                value, stages, share = reached, assignment, share / 4
                lower = self.bound(lower, value, deadline)
            else:
                share = min(2 * share + 0.01, 0.9)
        return lower, value, stages

    def dive(
        self, capacity: float, random: np.random.Generator, deadline: float
    ) -> IntArray | None:
        """Puts a plan together boundary by boundary, along weights that may lead to the end."""
        S, room = self._instance.num_stages, capacity / self._unit * (1 + 1e-12)
        forward = self._forward(room, mirrored=False)
        backward = self._forward(room, mirrored=True)
        stages: IntArray = np.full(self._instance.num_nodes, S - 1, np.int64)
        member, weight = np.zeros(self._instance.num_nodes, bool), 0.0
        for boundary in range(1, S):
            ahead = backward[S - boundary]
            low = self._total - float(ahead.high.max(initial=-np.inf))
            if not np.isfinite(low):
                return None
            swept = self._swept(
                member, boundary, room, deadline, random=random, low=low, high=weight + room
            )
            if swept is None:
                return None
            good = forward[boundary].holds(swept.work) & ahead.holds(self._total - swept.work)
            rows = np.flatnonzero(good)
            if not len(rows):
                return None
            row = rows[random.integers(len(rows))]
            wider = swept.members(np.array([row]))[:, 0]
            stages[wider & ~member] = boundary - 1
            member, weight = wider, float(swept.work[row])
        return stages if self._total - weight <= room else None
