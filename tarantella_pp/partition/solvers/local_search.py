"""Plans without proof: a first one, better ones, and ones that leave no stage empty."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.partition.problem import IntArray
from tarantella_pp.partition.solvers.instance import Instance
from tarantella_pp.partition.solvers.order_dp import OrderDP
from tarantella_pp.partition.solvers.orders import random_order, starting_orders


def start(instance: Instance, orders: OrderDP, lower: float) -> tuple[float, IntArray | None]:
    """Cuts a few orders and keeps the best plan.

    Args:
        instance: The instance.
        orders: Cuts orders of the instance.
        lower: A bound; a plan that meets it ends the search.

    Returns:
        The bottleneck and the stages, or infinity and None where no order keeps the limits.
    """
    value, best = float("inf"), None
    for order in starting_orders(instance):
        reached, stages = orders.solve(order)
        if reached < value:
            value, best = reached, stages
        if value <= lower * (1 + 1e-12):
            break
    return (value, best) if best is None else (instance.value(best), best)


def improve(
    instance: Instance,
    orders: OrderDP,
    stages: IntArray | None,
    lower: float,
    deadline: float,
) -> tuple[float, IntArray | None, float]:
    """Draws orders that keep the plan's stages whole and cuts them anew, until time is up.

    Args:
        instance: The instance.
        orders: Cuts orders of the instance.
        stages: The plan to start from, if there is one.
        lower: A bound; a plan that meets it ends the search.
        deadline: `time.perf_counter()` at which to stop.

    Returns:
        The bottleneck, the stages and the bound.
    """
    random = np.random.default_rng(0)
    value = float("inf") if stages is None else instance.value(stages)
    while time.perf_counter() < deadline and value > lower * (1 + 1e-12):
        reached, other = orders.solve(random_order(instance, random, stages))
        if reached <= value and np.isfinite(reached):
            value, stages = reached, other
    return value, stages, lower


def spread(instance: Instance, stages: IntArray) -> IntArray:
    """Splits full stages until none is empty, keeping the order of the nodes.

    Args:
        instance: The instance, with at least as many nodes as stages.
        stages: Stage of each node.

    Returns:
        The stages, each with at least one node.
    """
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
