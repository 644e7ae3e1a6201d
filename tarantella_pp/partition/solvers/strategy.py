"""One instance, from the first plan to the proof: which solver runs when."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from tarantella_pp.partition.solvers.contraction import fuse_uncuttable
from tarantella_pp.partition.solvers.exact.balance_dp import solve_balance
from tarantella_pp.partition.solvers.exact.chain_dp import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import Lattice, enumerate_ideals
from tarantella_pp.partition.solvers.exact.order_dp import OrderDP
from tarantella_pp.partition.solvers.exact.reversal import reversed_family, reversed_stages
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import IntArray
from tarantella_pp.partition.solvers.wide.boundary_weights import Boundaries
from tarantella_pp.partition.solvers.wide.bounds import (
    company_bound,
    granular,
    simple_bound,
)
from tarantella_pp.partition.solvers.wide.cut_bound import CutBound
from tarantella_pp.partition.solvers.wide.local_search import (
    LocalSearch,
    spread,
    start,
)
from tarantella_pp.partition.solvers.wide.stage_filling import StageFilling
from tarantella_pp.partition.solvers.wide.stage_windows import (
    MAX_NODES,
    Closure,
    window_bound,
)
from tarantella_pp.partition.solvers.wide.two_stages import TwoStages

#: Ideals listed at most; beyond them plans are searched for and bounded.
MAX_IDEALS = 600_000
#: Ideals, and ideals for each node, from which on a better plan is sought before the proof, in
#: so many rounds.
MANY_IDEALS = 5_000
WIDE = 20
ROUNDS = 6
#: Stages from which on they are filled one after the other: what is searched around a plan becomes
#: less with each stage more.
MANY_STAGES = 24
#: Values closer than this (relative) are the same.
EQUAL = 1e-11


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """What a search found and proved.

    Attributes:
        stages: Stage of each node of the instance, or None.
        lower_bound: No plan has a smaller bottleneck.
        method: How, in words.
        exhausted: Whether the absence of a plan is proven, where there is none.
    """

    stages: IntArray | None
    lower_bound: float
    method: str
    exhausted: bool = False


def search(
    instance: Instance, deadline: float, gap: float = 0.0, begin: IntArray | None = None
) -> Found:
    """Finds the best plan of an instance."""
    lower = simple_bound(instance)
    if instance.num_stages == 1:
        whole: IntArray = np.zeros(instance.num_nodes, np.int64)
        alone = instance.value(whole)
        return Found(whole if np.isfinite(alone) else None, alone, "one stage", True)
    orders = OrderDP(instance)
    value, stages = start(instance, orders, lower)
    if value <= lower * (1 + EQUAL):
        return Found(stages, lower, "order DP meets the bound")
    if instance.objective.terms.has_touch and instance.num_nodes <= MAX_NODES:
        lower = company_bound(instance, lower)
        if value <= lower * (1 + EQUAL):
            return Found(stages, lower, "order DP meets the bound of a node and its tensors")
    try:
        # A proof that takes too long leaves time to search instead.
        now = time.thread_time()
        outcome = _exact(instance, orders, lower, value, stages, now + 0.6 * (deadline - now))
    except OutOfTimeError:
        outcome = None
    if outcome is not None:
        return outcome if outcome.exhausted else _bounded(instance, outcome, deadline)
    if begin is not None and instance.value(begin) < value:
        stages = begin
    return _heuristic(instance, orders, lower, stages, deadline, gap)


def _bounded(instance: Instance, outcome: Found, deadline: float) -> Found:
    """Bounds what an exact search was cut off from proving."""
    if outcome.stages is None or instance.num_nodes > MAX_NODES:
        return outcome
    bound = CutBound(instance, Closure.of(instance))
    value = instance.value(outcome.stages)
    return replace(outcome, lower_bound=bound.improve(outcome.lower_bound, value, deadline))


def _heuristic(
    instance: Instance,
    orders: OrderDP,
    lower: float,
    stages: IntArray | None,
    deadline: float,
    gap: float,
) -> Found:
    """Searches and bounds, by turns, an instance whose ideals cannot be listed."""
    closure = Closure.of(instance) if instance.num_nodes <= MAX_NODES else None
    begun = time.thread_time()
    search_more = LocalSearch(instance, orders, closure)
    quarter = (deadline - begun) / 4
    uniform = instance.objective.uniform
    if closure is not None:
        total = float(instance.objective.node_costs().max(axis=0).sum())
        lower = window_bound(closure, lower, max(total, lower))
        lower = granular(instance, lower)
        if instance.settled and instance.num_stages >= MANY_STAGES:
            filling = StageFilling(instance, closure)
            lower, stages = filling.improve(stages, lower, gap, begun + 3.6 * quarter)
        if uniform and instance.additive:
            return _by_boundaries(instance, closure, search_more, lower, stages, deadline)
        if uniform and instance.settled and stages is not None:
            # Without what stages receive, which only makes them larger.
            boundaries = Boundaries(instance, closure)
            until = time.thread_time() + quarter
            lower = boundaries.bound(lower, instance.value(stages), until)
    if (
        closure is not None
        and uniform
        and instance.objective.terms.has_touch
        and instance.num_stages == 2
        and not instance.strict
        and len(instance.resources) == 1
    ):
        value = np.inf if stages is None else instance.value(stages)
        bound, better = TwoStages(instance).run(value, deadline)
        best = stages if better is None else better
        return Found(best, max(lower, bound), "least cuts, branch and bound")
    value, stages = search_more.run(stages, lower * (1 + gap), begun + quarter)
    if closure is not None:
        cut_bound = CutBound(instance, closure)
        lower = cut_bound.improve(lower, value, time.thread_time() + quarter)
    if value > lower * (1 + max(gap, EQUAL)):
        value, stages = search_more.run(stages, lower * (1 + gap), deadline)
    return Found(stages, min(lower, value), "order DP, neighbourhoods, least cuts and their bounds")


def _by_boundaries(
    instance: Instance,
    closure: Closure,
    search_more: LocalSearch,
    lower: float,
    stages: IntArray | None,
    deadline: float,
) -> Found:
    """Plans along the weights that boundaries can have, and searches around what that leaves."""
    boundaries = Boundaries(instance, closure)
    most = float(instance.objective.node_costs()[0].sum())
    value = most if stages is None else instance.value(stages)
    random = np.random.default_rng(0)
    while True:
        now = time.thread_time()
        until = now + 0.6 * (deadline - now)
        lower, value, stages = boundaries.search(value, stages, lower, random, until)
        if value <= lower * (1 + EQUAL) or time.thread_time() + 0.1 > deadline:
            return Found(stages, min(lower, value), "weights at boundaries")
        value, stages = search_more.run(stages, lower, until + 0.6 * (deadline - until))


def _exact(
    instance: Instance,
    orders: OrderDP,
    lower: float,
    value: float,
    stages: IntArray | None,
    deadline: float,
) -> Found | None:
    """Solves an instance whose ideals can be listed; None where they cannot."""
    if instance.additive:
        lattice = enumerate_ideals(instance, MAX_IDEALS, steps=True)
        if lattice is None:
            return None
        outcome = _balance(instance, lattice, lower, value, stages, deadline)
        if outcome.stages is None or not instance.strict:
            return outcome
        spreaded = spread(instance, outcome.stages)
        best = min(instance.value(spreaded), value)
        if best <= outcome.lower_bound * (1 + EQUAL):
            better = instance.value(spreaded) <= value
            return replace(outcome, stages=spreaded if better else stages)
        if instance.value(spreaded) < value:
            value, stages = instance.value(spreaded), spreaded
        return _chains(instance, lattice, outcome.lower_bound, value, stages, deadline)
    lattice = enumerate_ideals(instance, MAX_IDEALS)
    if lattice is None:
        return None
    small, place = instance, np.arange(instance.num_nodes)
    if stages is not None:
        if lattice.count > max(MANY_IDEALS, WIDE * instance.num_nodes):
            stages = LocalSearch(instance, orders, None).tighten(stages, ROUNDS, deadline)
            value = instance.value(stages)
        small, place = fuse_uncuttable(instance, value)
        lower = max(lower, min(simple_bound(small), value))
        if small.num_nodes < instance.num_nodes:
            lattice = enumerate_ideals(small, MAX_IDEALS)
            if lattice is None:
                return None
    outcome = _chains(small, lattice, lower, value, None, deadline)
    # Only better plans are looked for among the fused nodes; without one, ours is the best.
    return replace(outcome, stages=stages if outcome.stages is None else outcome.stages[place])


def _balance(
    instance: Instance,
    lattice: Lattice,
    lower: float,
    value: float,
    stages: IntArray | None,
    deadline: float,
) -> Found:
    most = float(instance.objective.node_costs().max(axis=0).sum()) * (1 + 1e-9)
    loose = replace(instance, strict=False)
    result = solve_balance(loose, lattice, lower, min(value, most), deadline)
    method = f"assembly-line DP, {lattice.count} ideals"
    best = stages if result.stages is None else result.stages
    return Found(best, result.lower_bound, method, True)


def _chains(
    instance: Instance,
    lattice: Lattice,
    lower: float,
    value: float,
    stages: IntArray | None,
    deadline: float,
) -> Found:
    family = IdealFamily(instance, lattice.words)
    chains, behind = ChainSearch(family), False
    turned = reversed_family(family)
    if turned is not None:
        other = ChainSearch(turned)
        # Where heavy nodes lie at the end, few ideals can begin the last stages.
        behind = other.pairs(value) < chains.pairs(value)
        chains = other if behind else chains
    method = f"chain DP, {lattice.count} ideals"
    # Whether anything better exists is often quickly refuted; the best is sought only if so.
    better = chains.run(value * (1 - EQUAL), deadline, goal="any")
    if better is None:
        return Found(stages, value, method, True)
    stages = reversed_stages(better[1], instance.num_stages) if behind else better[1]
    try:
        best = chains.run(instance.value(stages) * (1 + EQUAL), deadline)
    except OutOfTimeError:
        return Found(stages, lower, f"{method}, cut off")
    if best is not None:
        stages = reversed_stages(best[1], instance.num_stages) if behind else best[1]
    return Found(stages, instance.value(stages), method, True)
