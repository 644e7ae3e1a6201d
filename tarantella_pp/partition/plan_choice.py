"""Chooses the plan with the fastest step that fits, or says what would fit where none does."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Alternative, PlanConfig, common_limit
from tarantella_pp.partition.plan.plan_simulation import with_step
from tarantella_pp.partition.plan_search import (
    PATIENCE,
    Candidate,
    PlanSearch,
    Timed,
    in_order,
    largest_stage,
)
from tarantella_pp.partition.with_batch import ways_to_less_memory

# Share of a step that a further plan has to save.
WORTHWHILE = 0.05


def choose_plan(searches: Sequence[PlanSearch], further: Sequence[PlanSearch] = ()) -> Plan | None:
    """Makes the plan whose step is the shortest, within the memory limit.

    Those of `further` searches are taken where they are worth it.
    """
    deadline = time.thread_time() + PATIENCE
    candidates = _candidates(searches, deadline)
    best = _fastest(candidates, deadline)
    if best is None:
        return None
    cut = _fastest(_candidates(further, deadline), deadline)
    if cut is not None and cut[0] < (1 - WORTHWHILE) * best[0]:
        best = cut
    chosen = best[1]
    rest = [c for c in candidates if _kind_of(c) != _kind(chosen, chosen.assignment)]
    rest = rest or [
        c for c in candidates if c.options.num_micro_batches != chosen.num_micro_batches
    ]
    second = _fastest(rest, deadline, chosen)
    next_best = None if second is None or second[0] == math.inf else _alternative(second)
    return with_step(msgspec.structs.replace(chosen, next_best=next_best))


def _candidates(searches: Sequence[PlanSearch], deadline: float) -> list[Candidate]:
    """Returns what to choose from."""
    found: list[Candidate] = []
    for search in searches:
        if not found or time.thread_time() < deadline:
            found += search.candidates()
    return found


def _played(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields the fastest first; steps that cannot be the next are not played yet."""
    waiting = [((one.least_seconds, -1), place, one) for place, one in enumerate(candidates)]
    heapq.heapify(waiting)
    while waiting:
        (_, size), place, candidate = heapq.heappop(waiting)
        if size >= 0:
            yield candidate
        else:
            heapq.heappush(waiting, (candidate.order, place, candidate))


def _fastest(
    candidates: Iterable[Candidate], deadline: float, but: Plan | None = None
) -> Timed | None:
    """Returns the best of some candidates but one; a memory limit makes none of them faster."""
    found: list[Timed] = []
    for candidate in _played(candidates):
        if found and candidate.timed[0] >= min(found, key=in_order)[0]:
            break
        made = candidate.search.within_limit(candidate, deadline)
        found += [timed for timed in made if but is None or _differs(timed[1], but)]
        if found and not candidate.search.limited:
            break
    return min(found, key=in_order, default=None)


def _alternative(timed: Timed) -> Alternative:
    seconds, plan = timed
    return Alternative(
        num_stages=plan.num_stages,
        num_replicas=plan.num_replicas,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        balance=plan.balance,
        step_seconds=seconds,
        memory_bytes=largest_stage(plan),
    )


def _kind(plan: PlanConfig, assignment: Sequence[int]) -> tuple[object, ...]:
    """What plans of one kind have in common: stages that differ make another one."""
    return (plan.num_replicas, plan.schedule, tuple(assignment))


def _kind_of(candidate: Candidate) -> tuple[object, ...]:
    return _kind(candidate.options, candidate.solution.assignment)


def _differs(one: Plan, other: Plan) -> bool:
    """Whether plans run something else: stages that were simulated may become the same ones."""
    run = [(_kind(plan, plan.assignment), plan.num_micro_batches) for plan in (one, other)]
    return run[0] != run[1]


def infeasible(plan_search: PlanSearch) -> str:
    """Says which limit works, and what needs less."""
    least = plan_search.smallest_memory_plan()
    size, limits = largest_stage(least), plan_search.options().limits or (0,)
    known = "that works" if least.certificate.optimal else "found to work"
    named = format_bytes(limits[0])
    if common_limit(limits) is None:
        known, named = f"one for all stages {known}", "each of its stages"
    return (
        f"No plan of {least.num_stages} stages keeps the memory limit of {named}. "
        f"Received: memory_limit={plan_search.given.memory_limit!r}. The smallest {known} is "
        f"{size} bytes ({format_bytes(size)}), with num_micro_batches={least.num_micro_batches}, "
        f"recompute={least.recompute}. {ways_to_less_memory(least)}"
    )
