"""Lower bounds on the bottleneck of any plan."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray
from tarantella_pp.partition.solvers.wide.min_cut import least_cut

#: Nodes around which a cut is sought.
MAX_COMPANIES = 12


def simple_bound(instance: Instance) -> float:
    """Bounds the bottleneck by the mean, the heaviest node and pairs of heavy nodes."""
    S, resource = instance.num_stages, instance.objective
    factor, room = resource.factor, 1 / resource.scale
    fixed, held = float(resource.fixed.sum()), float(resource.held.sum())
    # Stages of scale a hold at most C / a each, so all together C * sum(1 / a).
    mean = (fixed + factor.min() * held) / room.sum()
    if factor.min() > 0:
        mean = max(mean, (fixed / factor.max() + held) / (room / factor).sum())
    costs = resource.node_costs().min(axis=0)
    return max(float(mean), float(costs.max(initial=0.0)), _pairs(costs, S))


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


def company_bound(instance: Instance, lower: float) -> float:
    """Bounds a load by what any stage pays that holds one of the costliest nodes.

    Whatever else the stage holds, it pays for that and for the tensors that it shares: at least
    a minimum cut around the node. Where one operation and its tensors dominate a graph, this is
    the optimum for any number of stages.
    """
    resource, n = instance.objective, instance.num_nodes
    terms, scale = resource.terms, float(resource.scale.min())
    weight = resource.fixed + float(resource.factor.min()) * resource.held
    alone = weight.copy()
    for pins, touch in zip(terms.pins, terms.touch.tolist(), strict=True):
        alone[list(pins)] += touch
    # Any nodes may keep company here, whatever lies between them.
    loose = replace(instance, preds=((),) * n, succs=((),) * n)
    nobody, covered = np.zeros(n, bool), np.zeros(n, bool)
    for _ in range(MAX_COMPANIES):
        node = int(np.where(covered, -1.0, alone).argmax())
        if covered[node] or scale * alone[node] <= lower:
            break
        itself = nobody.copy()
        itself[node] = True
        cost, company = least_cut(loose, terms.touch, itself, nobody, weight)
        lower = max(lower, scale * (cost + float(weight[node])) * (1 - 1e-12))
        # The others of the company are bounded by no more.
        covered |= company
    return lower


def unit_of(costs: FloatArray) -> float:
    """Finds the unit of which all costs are whole multiples, such as a byte or a microsecond."""
    for digits in range(7):
        scaled = costs * 10.0**digits
        whole = np.rint(scaled)
        if whole.sum() < 2**52 and (np.abs(scaled - whole) <= 1e-12 * np.maximum(whole, 1)).all():
            return math.gcd(*(int(cost) for cost in whole)) / 10.0**digits
    return 0.0


def granular(instance: Instance, bound: float) -> float:
    """Rounds a bound up to what sums of the node costs can be.

    Where all costs are whole multiples of a unit, so is every stage of an additive objective.
    """
    resource = instance.objective
    if not (instance.additive and resource.uniform):
        return bound
    unit = unit_of(resource.node_costs()[0])
    if unit == 0.0:
        return bound
    return max(bound, math.ceil(bound / unit * (1 - 1e-11)) * unit * (1 - 1e-12))
