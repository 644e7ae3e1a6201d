"""Many plans near one: the ideals around each of its boundaries, recombined exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tarantella_pp.partition.solvers.exact.chain_dp import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import pack
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import IntArray
from tarantella_pp.partition.solvers.wide.ideal_sweep import IdealRange, IdealSweep


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a neighbourhood goes.

    Attributes:
        nodes: Nodes on either side of a boundary, along an order, that may change sides.
        ideals: Ideals kept at each boundary, those that cut least first.
    """

    nodes: int
    ideals: int


def recombine(
    instance: Instance,
    stages: IntArray,
    order: IntArray,
    reach: Reach,
    random: np.random.Generator,
    deadline: float,
) -> IntArray | None:
    """Looks for a better plan whose every boundary is near one of a plan's boundaries.

    Around each boundary the nodes next to it along the order are free, the others stay; the
    ideals of the free nodes are listed, and the chain DP over all of them together finds the
    best combination: exponentially many plans at once.
    """
    value = instance.value(stages)
    n, S = instance.num_nodes, instance.num_stages
    sorted_stages = stages[order]
    resource = instance.objective
    weight = resource.fixed + resource.factor.min() * resource.held
    sweep = IdealSweep(instance, weight, resource.terms.touch if resource.terms.has_touch else None)
    groups = [pack(np.array([[False, True]] * n))]
    for boundary in range(1, S):
        cut = int(np.searchsorted(sorted_stages, boundary))
        if 0 < cut < n:
            low, high = max(0, cut - reach.nodes), min(n, cut + reach.nodes)
            inside = np.zeros(n, bool)
            inside[order[:low]] = True
            free = order[low:high]
            least, most = _window(instance, boundary, value)
            span = IdealRange(inside, free, least / sweep.unit, most / sweep.unit)
            # Of ideals with one future, each fits other ideals at the boundary before.
            swept = sweep.run(span, deadline, limit=reach.ideals, random=random, alike=True)
            if swept is None:
                return None
            groups.append(swept.take(np.arange(len(swept))))
            exact = np.zeros((n, 1), bool)
            exact[order[:cut]] = True
            groups.append(pack(exact))
    words = np.unique(np.concatenate(groups, axis=1), axis=1)
    family = ends_first_and_last(IdealFamily(instance, words), n)
    try:
        chain = ChainSearch(family).run(value * (1 - 1e-9), deadline)
    except OutOfTimeError:
        return None
    return None if chain is None else chain[1]


def ends_first_and_last(family: IdealFamily, n: int) -> IdealFamily:
    """Sorts a family by size, as the chain search wants it."""
    size = np.zeros(len(family), np.int64)
    for node in range(n):
        size += ((family.words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1)).astype(np.int64)
    return family.take(np.argsort(size, kind="stable"))


def _window(instance: Instance, boundary: int, value: float) -> tuple[float, float]:
    """Returns the least and the most work before a boundary of a plan below a value."""
    resource = instance.objective
    room = value / resource.scale
    held = resource.factor.min()
    total = float((resource.fixed + held * resource.held).sum())
    return total - float(room[boundary:].sum()), float(room[:boundary].sum())
