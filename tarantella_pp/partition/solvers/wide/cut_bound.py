"""A bound from prices: what must lie before, and cross, each boundary of a plan."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    INPUT,
    Instance,
)
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.min_cut import least_cut
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

#: Steps along the subgradient for each capacity.
STEPS = 40
#: Relative width of the bisection at which it stops.
CLOSE = 1e-4


class CutBound:
    """Bounds the bottleneck by the least that must lie on either side of each boundary.

    For stage weights l that sum to 1, the largest stage costs at least the weighted sum of all,
    which splits into one term for each boundary: a price on the nodes before it and a price on
    the tensors across it. Each term is at least a minimum cut between the nodes that must lie
    before the boundary and those that must lie after it. A tensor that can cross k boundaries is
    charged to each with 1 / k of the least that it can cost. The weights follow the subgradient
    (Lagrangian relaxation; Held and Karp, Mathematical Programming 1, 1971).
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._closure = closure
        resource, terms = instance.objective, instance.objective.terms
        self._work = resource.node_costs()
        self._touch = resource.scale[:, None] * terms.touch
        held = terms.receive + resource.factor[:, None] * terms.receive_held
        self._receive = resource.scale[:, None] * held * self._received()
        self._flat, self._starts = terms.flat()

    def improve(self, lower: float, upper: float, deadline: float) -> float:
        """Raises a bound by bisection."""
        # Where all stages weigh the same under these prices, none is worth more than another.
        mean = self._work.sum(axis=1)
        weights = 1 / np.maximum(mean, 1e-300)
        weights /= weights.sum()
        ceiling = upper
        while ceiling - lower > CLOSE * upper and time.thread_time() < deadline:
            middle = (lower + ceiling) / 2
            refuted, weights = self._refutes(middle, weights, deadline)
            if refuted:
                lower = middle
            else:
                ceiling = middle
        return lower

    def _received(self) -> NDArray[np.bool_]:
        """Tells which tensors some stage receives wherever they are cut."""
        terms = self._instance.objective.terms
        pairs = zip(terms.producer.tolist(), terms.pins, strict=True)
        reach = self._closure.reach
        found = [
            producer == ANY or (producer != INPUT and bool(reach[producer, list(pins)].all()))
            for producer, pins in pairs
        ]
        return np.array(found, dtype=bool)

    def _refutes(
        self, capacity: float, weights: FloatArray, deadline: float
    ) -> tuple[bool, FloatArray]:
        """Tells whether no plan keeps within a capacity, and the weights that tell most."""
        first, last = self._closure.stages(capacity)
        if (first > last).any():
            return True, weights
        prices = _Crossings(self._spread(last, np.maximum), self._spread(first, np.minimum))
        best, most = weights, -np.inf
        step = 0.3
        for _ in range(STEPS):
            bound, loads = self._weighted(weights, first, last, prices)
            if bound > most:
                best, most = weights, bound
            if bound > capacity:
                return True, weights
            if time.thread_time() > deadline:
                break
            pull = (loads - loads.mean()) / max(np.abs(loads).max(), 1e-300)
            weights = np.maximum(weights + step * pull / len(loads), 0.0)
            weights /= weights.sum()
            step *= 0.8
        return False, best

    def _spread(self, stages: IntArray, ufunc: np.ufunc) -> IntArray:
        """Returns the last, or the first, stage that each tensor can meet."""
        reduced: IntArray = ufunc.reduceat(stages[self._flat], self._starts)
        return reduced

    def _weighted(
        self, weights: FloatArray, first: IntArray, last: IntArray, crossings: _Crossings
    ) -> tuple[float, FloatArray]:
        """Returns the bound for some weights, and the loads of the cuts that gave it."""
        S = self._instance.num_stages
        bound = float(weights[-1] * self._work[-1].sum())
        loads = np.zeros(S)
        loads[-1] = self._work[-1].sum()
        touch = crossings.ends(weights[:, None] * self._touch)
        receive = crossings.later(weights[:, None] * self._receive)
        for boundary in range(1, S):
            inside, outside = last < boundary, first >= boundary
            ours, theirs = self._work[boundary - 1], self._work[boundary]
            price = weights[boundary - 1] * ours - weights[boundary] * theirs
            share = touch[boundary] + receive[boundary]
            cost, member = least_cut(self._instance, share, inside, outside, price)
            bound += cost + float(price[inside].sum())
            loads[boundary - 1] += float(ours[member].sum())
            loads[boundary] -= float(theirs[member].sum())
            cut = self._cut(member)
            loads[boundary - 1] += float(self._touch[boundary - 1, cut].sum())
            loads[boundary] += float((self._touch + self._receive)[boundary, cut].sum())
        return bound, loads

    def _cut(self, member: NDArray[np.bool_]) -> NDArray[np.bool_]:
        pins = member[self._flat]
        cut = np.maximum.reduceat(pins, self._starts) ^ np.minimum.reduceat(pins, self._starts)
        return cut.astype(bool)


class _Crossings:
    """Shares what tensors cost among the boundaries that they can cross."""

    def __init__(self, most: IntArray, least: IntArray) -> None:
        self._most, self._least = most, least
        self._count = np.maximum(most - least, 1)

    def ends(self, costs: FloatArray) -> FloatArray:
        """Returns what a tensor costs at least at each boundary, where its two ends pay."""
        shares = np.zeros_like(costs)
        smallest = self._smallest(costs, self._least)
        for boundary in range(1, len(costs)):
            both = costs[boundary - 1] + costs[boundary]
            shares[boundary] = np.where(self._count == 1, both, 2 * smallest / self._count)
        return shares

    def later(self, costs: FloatArray) -> FloatArray:
        """Returns the same where all stages pay that touch the tensor, but the first."""
        shares = np.zeros_like(costs)
        smallest = self._smallest(costs, self._least + 1)
        for boundary in range(1, len(costs)):
            alone = self._count == 1
            shares[boundary] = np.where(alone, costs[boundary], smallest / self._count)
        return shares

    def _smallest(self, costs: FloatArray, least: IntArray) -> FloatArray:
        smallest = np.full(costs.shape[1], np.inf)
        for stage, cost in enumerate(costs):
            meets = (least <= stage) & (stage <= self._most)
            smallest = np.where(meets, np.minimum(smallest, cost), smallest)
        return np.where(np.isfinite(smallest), smallest, 0.0)
