"""Lower bounds on the bottleneck of any plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tarantella_pp.partition.problem import FloatArray
from tarantella_pp.partition.solvers.instance import Instance

#: Ideals listed from either end.
MAX_FILLS = 300_000


def simple_bound(instance: Instance) -> float:
    """Bounds the bottleneck by the mean, the heaviest node and pairs of heavy nodes.

    Args:
        instance: The instance.

    Returns:
        The largest of the bounds that hold for its objective.
    """
    S, resource = instance.num_stages, instance.objective
    lean = float(resource.factor.min())
    weight = resource.alpha + lean * resource.beta
    # Stages of scale a hold at most C / a each, so all together C * sum(1 / a).
    mean = float(weight.sum() / (1 / resource.scale).sum())
    costs = resource.node_costs().min(axis=0)
    return max(mean, float(costs.max(initial=0.0)), _pairs(costs, S))


def _pairs(costs: FloatArray, stages: int) -> float:
    """Of the k S + 1 heaviest nodes, k + 1 share a stage."""
    heavy = np.sort(costs)[::-1]
    best = 0.0
    for k in range(1, len(heavy) // stages + 1):
        if k * stages >= len(heavy):
            break
        best = max(best, float(heavy[k * stages - k : k * stages + 1].sum()))
        if k > 64:
            break
    return best


def granular(instance: Instance, bound: float) -> float:
    """Rounds a bound up to what sums of the node costs can be.

    Where all costs are whole multiples of a unit (a byte, a microsecond in milliseconds), so is
    every stage of an additive objective.

    Args:
        instance: The instance.
        bound: A bound.

    Returns:
        A bound, at least as large.
    """
    resource = instance.objective
    if not (instance.additive and resource.uniform):
        return bound
    costs = resource.node_costs()[0]
    for digits in range(7):
        scaled = costs * 10.0**digits
        whole = np.rint(scaled)
        if whole.sum() < 2**52 and (np.abs(scaled - whole) <= 1e-12 * np.maximum(whole, 1)).all():
            unit = math.gcd(*(int(cost) for cost in whole))
            if unit == 0:
                return bound
            steps = math.ceil(bound * 10.0**digits / unit * (1 - 1e-11))
            return max(bound, steps * unit / 10.0**digits * (1 - 1e-12))
    return bound


def ends_bound(instance: Instance, lower: float) -> float:
    """Bounds an additive bottleneck by how well the first and the last stage can be filled.

    All ideals that fit one stage are listed from either end, where they are few; a capacity
    that leaves both ends too empty for the stages between them is refuted.

    Args:
        instance: The instance.
        lower: A bound known.

    Returns:
        A bound, at least `lower`.
    """
    resource, S = instance.objective, instance.num_stages
    if not (instance.additive and resource.uniform) or S < 3:
        return lower
    costs = resource.node_costs()[0]
    most = lower * 1.02
    first = _fills(instance.preds, range(instance.num_nodes), costs, most)
    last = _fills(instance.succs, range(instance.num_nodes - 1, -1, -1), costs, most)
    total = float(costs.sum())
    low, high = lower, most
    for _ in range(60):
        middle = (low + high) / 2
        if _filled(first, middle) + _filled(last, middle) + (S - 2) * middle < total * (1 - 1e-12):
            low = middle
        else:
            high = middle
    return low


def _filled(fills: FloatArray | None, capacity: float) -> float:
    if fills is None:
        return capacity
    return float(fills[np.searchsorted(fills, capacity, "right") - 1])


def _fills(
    before: Sequence[Sequence[int]], order: Iterable[int], costs: FloatArray, most: float
) -> FloatArray | None:
    """Lists the costs of all ideals up to a capacity, sorted; None where they are too many."""
    count = len(costs)
    words = np.zeros(((count + 63) // 64, 1), np.uint64)
    sums = np.zeros(1)
    for node in order:
        ready = sums + costs[node] <= most
        for other in before[node]:
            ready &= (words[other >> 6] >> np.uint64(other & 63) & np.uint64(1)).astype(bool)
        grows = np.flatnonzero(ready)
        if not len(grows):
            continue
        if len(sums) + len(grows) > MAX_FILLS:
            return None
        grown = words[:, grows].copy()
        grown[node >> 6] |= np.uint64(1 << (node & 63))
        words = np.concatenate([words, grown], axis=1)
        sums = np.concatenate([sums, sums[grows] + costs[node]])
    return np.sort(sums)
