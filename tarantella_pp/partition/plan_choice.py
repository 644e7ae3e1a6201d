"""Chooses the plan with the fastest step that fits, or says what would fit where none does."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import GIVEN, PlanOptions
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Alternative, PlanConfig, common_limit
from tarantella_pp.partition.plan.plan_simulation import stage_seconds, with_step
from tarantella_pp.partition.plan_search import (
    PATIENCE,
    Candidate,
    PlanSearch,
    Timed,
    largest_stage,
)
from tarantella_pp.partition.planner import Planner
from tarantella_pp.partition.rank_balancing import rank_totals

# Share of a step, or of memory, that a plan has to save to be advised, or to be a further one.
WORTHWHILE = 0.05


def choose_plan(
    searches: Sequence[PlanSearch],
    others: Sequence[PlanSearch] = (),
    further: Sequence[PlanSearch] = (),
) -> Plan | None:
    """Makes the plan whose step is the shortest, within the memory limit."""
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
    found = {
        "next_best": _fastest(rest, deadline, chosen),
        "advice": _advice(best, candidates, others),
    }
    compared = {name: timed and _alternative(timed) for name, timed in found.items()}
    return with_step(msgspec.structs.replace(chosen, **compared))


def _candidates(searches: Sequence[PlanSearch], deadline: float) -> list[Candidate]:
    """Returns what to choose from."""
    found: list[Candidate] = []
    for search in searches:
        if not found or time.thread_time() < deadline:
            found += search.candidates()
    return found


def _in_order(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
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
    for candidate in _in_order(candidates):
        if found and candidate.timed[0] >= min(found, key=_order)[0]:
            break
        made = candidate.search.within_limit(candidate, deadline)
        found += [timed for timed in made if but is None or _differs(timed[1], but)]
        if found and not candidate.limited:
            break
    return min(found, key=_order, default=None)


def _advice(
    best: Timed, candidates: Sequence[Candidate], others: Sequence[PlanSearch]
) -> Timed | None:
    """Finds a plan with another balance, all else alike: a faster one, else a smaller one."""
    seconds, chosen = best
    alike = [c.timed for c in candidates if _but_balance(c.options) == _but_balance(chosen)]
    most = (1 - WORTHWHILE) * largest_stage(chosen)
    smaller = [timed for timed in alike if largest_stage(timed[1]) < most]
    faster = []
    for search in others:
        shape = (search.given.num_stages, search.given.num_replicas, search.spec.name)
        if shape == (chosen.num_stages, chosen.num_replicas, chosen.schedule):
            faster += search.of_count(chosen.num_micro_batches)
    faster = [timed for timed in faster if timed[0] < (1 - WORTHWHILE) * seconds]
    return min(faster or smaller, key=_order, default=None)


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


def _but_balance(plan: PlanConfig) -> tuple[object, ...]:
    return (plan.num_stages, plan.num_replicas, plan.schedule, plan.num_micro_batches)


def _order(timed: Timed) -> tuple[float, int]:
    return (timed[0], largest_stage(timed[1]))


# How many times the mean a rank may have of the work before a limit is not worth keeping.
USELESS = 1.5
# How many times as many stages are tried.
MORE_STAGES = (2, 4)


def infeasible(plan_search: PlanSearch) -> str:
    """Says which limit works, and which other options need less."""
    least = plan_search.smallest_memory_plan()
    size, limits = largest_stage(least), plan_search.options().limits or (0,)
    limit = min(limits)
    known, named = (
        "that works" if least.certificate.optimal else "found to work",
        format_bytes(limit),
    )
    if common_limit(limits) is None:
        known, named = f"one for all stages {known}", "each of its stages"
    others = [
        f"{text} ({format_bytes(other)}, {'fits' if other <= limit else 'too much as well'})"
        for text, plan in _alternatives(plan_search)
        if (other := largest_stage(plan)) < size
    ]
    advice = f" Less is needed with {' or '.join(others)}." if others else ""
    return (
        f"No plan of {least.num_stages} stages keeps the memory limit of {named}. "
        f"Received: memory_limit={plan_search.given.memory_limit!r}. The smallest {known} is "
        f"{size} bytes ({format_bytes(size)}), with num_micro_batches={least.num_micro_batches}, "
        f"recompute={least.recompute}.{advice}"
    )


def useless(plan: Plan, planner: Planner, balance: str | None) -> str | None:
    """Says that a memory limit leaves a plan in which one rank has most of the work, if it does."""
    heaviest = _heaviest(plan)
    if plan.memory_limit is None or heaviest <= USELESS or plan.balance == GIVEN:
        return None
    free = PlanOptions(
        num_stages=plan.num_stages, batch_size=plan.batch_size, num_replicas=plan.num_replicas,
        num_micro_batches=plan.num_micro_batches, balance=balance or "flops",
    ).settled(plan.schedule_spec())  # fmt: skip
    without = _heaviest(planner.plan(free))
    if without > USELESS:
        return None
    return (
        f"One rank has {heaviest:.1f} times as much work as the mean of all {plan.num_ranks}, and "
        f"the others wait for it: the memory limit leaves no better plan. Without it, it would be "
        f"{without:.1f} times. Received: memory_limit={plan.memory_limit}. More stages, more "
        "micro-batches or recompute='all' need less memory."
    )


def _heaviest(plan: Plan) -> float:
    """Returns the work of the rank with the most, over the mean of all ranks."""
    measured = [stage.seconds for stage in plan.stages]
    found = stage_seconds(plan, plan.machine or HardwareSpec(), plan.micro_batch_size)
    planned = [forward + backward for forward, backward in found]
    work = [p if m is None else m for m, p in zip(measured, planned, strict=True)]
    ranks = rank_totals(work, plan.ranks)
    return float(ranks.max() / (ranks.mean() or 1.0))


def _alternatives(plan_search: PlanSearch) -> Iterator[tuple[str, Plan]]:
    """Yields options that were given, or stages, in another way, and the least plan with them."""
    asked = plan_search.given
    for option in ("num_micro_batches", "recompute"):
        if option not in asked.given():
            continue
        given = replace(asked, **dict[str, Any]({option: None}))
        plan = replace(plan_search, given=given).smallest_memory_plan()
        yield f"{option}={getattr(plan, option)}", plan
    stages_fixed = plan_search.spec.custom is not None or asked.balance == GIVEN
    for times in () if stages_fixed else MORE_STAGES:
        spec = replace(
            plan_search.spec,
            num_stages=times * plan_search.spec.num_stages,
            num_ranks=times * plan_search.spec.num_ranks,
        )
        given = replace(asked, num_stages=spec.num_stages)
        try:
            yield (
                f"num_stages={spec.num_stages}",
                replace(plan_search, given=given, spec=spec).smallest_memory_plan(),
            )
        except (ConfigurationError, PlanError):  # more than there are operations to part
            return
