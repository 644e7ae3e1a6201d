"""Lower bounds on the bottleneck of any plan."""

from __future__ import annotations

import numpy as np

from tarantella_pp.partition.problem import FloatArray
from tarantella_pp.partition.solvers.instance import Instance


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
