"""Which stages a node may lie on in any plan below a capacity, and what follows from it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.instance import Instance
from tarantella_pp.partition.solvers.mincut import least_cut

#: Nodes up to which all pairs of ancestors are kept.
MAX_NODES = 4000


@dataclass(frozen=True, eq=False, slots=True)
class Closure:
    """Work that must come no later, and no earlier, than each node; itself included."""

    before: FloatArray
    after: FloatArray

    @classmethod
    def of(cls, instance: Instance) -> Closure:
        """Sums the least work over all ancestors and descendants of each node."""
        n, resource = instance.num_nodes, instance.objective
        weight = resource.alpha + resource.factor.min() * resource.beta
        reach = np.eye(n, dtype=bool)
        for node in range(n - 1, -1, -1):
            for after in instance.succs[node]:
                reach[node] |= reach[after]
        return cls(weight @ reach, reach @ weight)

    def stages(self, num_stages: int, capacity: float) -> tuple[IntArray, IntArray]:
        """Returns the first and the last stage of each node in plans within a capacity."""
        first = np.ceil(self.before / capacity * (1 - 1e-12) - 1e-9).astype(np.int64) - 1
        last = num_stages - np.ceil(self.after / capacity * (1 - 1e-12) - 1e-9).astype(np.int64)
        return np.maximum(first, 0), np.minimum(last, num_stages - 1)


def window_bound(instance: Instance, closure: Closure, lower: float, upper: float) -> float:
    """Bounds the bottleneck by the stages that ancestors and descendants fill on their own.

    A node whose ancestors need e stages and whose descendants need l more than S - e of them
    cannot be placed (the earliest and latest stations of assembly-line balancing, Saltzman and
    Baybars 1987).

    Args:
        instance: An instance whose stages have equal scale.
        closure: Its ancestors' and descendants' work.
        lower: A bound known.
        upper: A value known.

    Returns:
        A bound, at least `lower`.
    """
    for _ in range(60):
        if upper - lower <= 1e-12 * upper:
            break
        middle = (lower + upper) / 2
        first, last = closure.stages(instance.num_stages, middle)
        if (first > last).any():
            lower = middle
        else:
            upper = middle
    return lower


class CutBound:
    """Bounds a load by the least that must cross each boundary.

    For stage weights l that sum to 1, the largest load is at least the weighted sum of all
    loads, which splits into one term for each boundary: a price on the nodes before it and a
    price on the tensors across it. Each term is at least a minimum cut between the nodes that
    must lie before the boundary and those that must lie after it. A tensor that can cross k
    boundaries is charged to each with 1 / k of what its two ends pay. The weights follow the
    subgradient.

    Args:
        instance: An instance whose stages cost the same.
        closure: Its ancestors' and descendants' work.
    """

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._closure = closure
        resource = instance.objective
        self._work = resource.scale[0] * (resource.alpha + resource.factor[0] * resource.beta)
        self._touch = resource.scale[0] * resource.terms.touch
        pins = resource.terms.pins
        self._flat = np.array([pin for one in pins for pin in one], dtype=np.int64)
        sizes = np.array([len(one) for one in pins], dtype=np.int64)
        self._starts = np.cumsum(sizes) - sizes

    def improve(self, lower: float, upper: float, deadline: float) -> float:
        """Raises a bound by bisection.

        Args:
            lower: A bound known.
            upper: A value known.
            deadline: `time.perf_counter()` at which to stop.

        Returns:
            A bound, at least `lower`.
        """
        weights = np.full(self._instance.num_stages, 1 / self._instance.num_stages)
        ceiling = upper
        while ceiling - lower > 1e-3 * upper and time.perf_counter() < deadline:
            middle = (lower + ceiling) / 2
            refuted, weights = self._refutes(middle, weights, deadline)
            if refuted:
                lower = middle
            else:
                ceiling = middle
        return lower

    def _refutes(
        self, capacity: float, weights: FloatArray, deadline: float
    ) -> tuple[bool, FloatArray]:
        """Tells whether no plan keeps within a capacity, as far as the bound can tell."""
        first, last = self._closure.stages(self._instance.num_stages, capacity)
        if (first > last).any():
            return True, weights
        most = np.maximum.reduceat(last[self._flat], self._starts)
        least = np.minimum.reduceat(first[self._flat], self._starts)
        best = weights
        step = 0.3
        for _ in range(12):
            bound, loads = self._weighted(weights, first, last, most, least)
            if bound > capacity:
                return True, weights
            if time.perf_counter() > deadline:
                break
            best = weights
            weights = weights + step * (loads - loads.mean()) / max(loads.max(), 1e-300) / len(
                loads
            )
            weights = np.maximum(weights, 0.0)
            weights /= weights.sum()
            step *= 0.8
        return False, best

    def _weighted(
        self, weights: FloatArray, first: IntArray, last: IntArray, most: IntArray, least: IntArray
    ) -> tuple[float, FloatArray]:
        """Returns the bound for some weights, and the loads of the cuts that gave it."""
        S = self._instance.num_stages
        bound = float(weights[-1] * self._work.sum())
        loads = np.zeros(S)
        loads[-1] = self._work.sum()
        crossings = np.maximum(most - least, 1)
        once = crossings == 1
        # The two ends of a tensor weigh at least twice the smallest weight it can meet.
        smallest = np.full(len(most), np.inf)
        for stage in range(S):
            meets = (least <= stage) & (stage <= most)
            smallest = np.where(meets, np.minimum(smallest, weights[stage]), smallest)
        thin = 2 * smallest / crossings
        for boundary in range(1, S):
            inside, outside = last < boundary, first >= boundary
            ends = weights[boundary - 1] + weights[boundary]
            share = np.where(once, ends, thin)
            price = (weights[boundary - 1] - weights[boundary]) * self._work
            cost, member = least_cut(self._instance, share * self._touch, inside, outside, price)
            bound += cost + float(price[inside].sum())
            work = float(self._work[member].sum())
            loads[boundary - 1] += work
            loads[boundary] -= work
            crossing = self._crossing(member)
            loads[boundary - 1] += crossing
            loads[boundary] += crossing
        return bound, loads

    def _crossing(self, member: NDArray[np.bool_]) -> float:
        pins = member[self._flat]
        cut = np.maximum.reduceat(pins, self._starts) ^ np.minimum.reduceat(pins, self._starts)
        return float(self._touch[cut].sum())
