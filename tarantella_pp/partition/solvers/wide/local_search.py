"""Plans without proof: a first one, better ones, and ones that leave no stage empty."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.partition.solvers.exact.order_dp import OrderDP
from tarantella_pp.partition.solvers.exact.orders import random_order, starting_orders
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import IntArray
from tarantella_pp.partition.solvers.wide.ideal_pool import IdealPool
from tarantella_pp.partition.solvers.wide.neighbourhood import Reach, recombine
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

#: Ideals around a boundary, times the cube of the stages.
MAX_NEIGHBOURS = 200_000
#: Rounds without a better plan after which the search begins anew.
PATIENCE = 5


def start(instance: Instance, orders: OrderDP, lower: float) -> tuple[float, IntArray | None]:
    """Cuts a few orders and keeps the best plan."""
    value, best = float("inf"), None
    for order in starting_orders(instance):
        reached, stages = orders.solve(order)
        if reached < value:
            value, best = reached, stages
        if value <= lower * (1 + 1e-12):
            break
    return (value, best) if best is None else (instance.value(best), best)


class LocalSearch:
    """Better plans from a plan, for graphs whose ideals are too many to list.

    Each round cuts random orders that keep the plan's stages whole, recombines the ideals around
    its boundaries, and, where tensors cost their stages, least cuts between its boundaries. After
    some rounds in vain it begins again with the first plan, and other luck.
    Deterministic but for the moment at which time runs out.
    """

    def __init__(self, instance: Instance, orders: OrderDP, closure: Closure | None) -> None:
        self._instance = instance
        self._orders = orders
        self._random = np.random.default_rng(0)
        self._first: tuple[float, IntArray | None] | None = None
        cuts = instance.objective.terms.has_touch and instance.objective.uniform
        self._pool = IdealPool(instance, closure) if cuts and closure is not None else None

    def run(
        self, stages: IntArray | None, lower: float, deadline: float
    ) -> tuple[float, IntArray | None]:
        """Improves a plan until time is up or the bound is met."""
        value = float("inf") if stages is None else self._instance.value(stages)
        if self._pool is not None:
            self._pool.add_grid(60, deadline)
        best = value, stages
        if self._first is None:
            self._first = best
        idle = 0
        while time.thread_time() < deadline and value > lower * (1 + 1e-12):
            before = value
            value, stages = self._cut_orders(value, stages, deadline)
            if stages is None:
                continue
            for better in (self._from_pool, self._from_neighbours):
                other = better(value, stages, deadline)
                if other is not None:
                    value, stages = self._instance.value(other), other
            idle = 0 if value < before else idle + 1
            if value < best[0]:
                best = value, stages
            if idle == PATIENCE and self._pool is not None:
                # Nothing better is near: another way from the start may lead elsewhere.
                (value, stages), idle = self._first, 0
                self._pool.forget()
        return best

    def tighten(self, stages: IntArray, rounds: int, deadline: float) -> IntArray:
        """Improves a plan by a fixed number of small rounds: the same plan on every machine."""
        value = self._instance.value(stages)
        for _ in range(rounds):
            value, better = self._cut_orders(value, stages, deadline)
            stages = stages if better is None else better
            order = random_order(self._instance, self._random, stages)
            other = recombine(self._instance, stages, order, Reach(15, 200), self._random, deadline)
            if other is not None:
                value, stages = self._instance.value(other), other
        return stages

    def _cut_orders(
        self, value: float, stages: IntArray | None, deadline: float
    ) -> tuple[float, IntArray | None]:
        for _ in range(4):
            if time.thread_time() > deadline:
                break
            order = random_order(self._instance, self._random, stages)
            reached, other = self._orders.solve(order)
            if reached <= value and np.isfinite(reached):
                value, stages = reached, other
        return (value, stages) if stages is None else (self._instance.value(stages), stages)

    def _from_pool(self, value: float, stages: IntArray, deadline: float) -> IntArray | None:
        if self._pool is None:
            return None
        self._pool.add_around(stages, self._random, 10, deadline)
        self._pool.cross(stages, self._random, 20)
        return self._pool.recombine(value, deadline)

    def _from_neighbours(self, value: float, stages: IntArray, deadline: float) -> IntArray | None:
        nodes = int(self._random.integers(20, 90))
        few = MAX_NEIGHBOURS // self._instance.num_stages**3
        reach = Reach(nodes, max(100, min(few, MAX_NEIGHBOURS // 10)))
        order = random_order(self._instance, self._random, stages)
        return recombine(self._instance, stages, order, reach, self._random, deadline)


def spread(instance: Instance, stages: IntArray) -> IntArray:
    """Splits full stages until none is empty, keeping the order of the nodes."""
    order = np.lexsort((np.arange(len(stages)), stages))
    bounds = np.flatnonzero(np.diff(stages[order])) + 1
    parts = np.split(order, bounds)
    while len(parts) < instance.num_stages:
        widest = max(range(len(parts)), key=lambda index: len(parts[index]))
        half = len(parts[widest]) // 2
        parts[widest : widest + 1] = [parts[widest][:half], parts[widest][half:]]
    spread_out = np.empty(len(stages), np.int64)
    for stage, part in enumerate(parts):
        spread_out[part] = stage
    return spread_out
