"""What to say where no plan keeps a memory limit, or none that is worth it: what would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.given_balance import GIVEN
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import common_limit
from tarantella_pp.partition.plan.plan_simulation import stage_seconds
from tarantella_pp.partition.plan_search import PlanSearch, largest_stage
from tarantella_pp.partition.planner import Planner
from tarantella_pp.partition.rank_balancing import rank_totals

USELESS = 1.5
"""How many times the mean a rank may have of the work before a limit is not worth keeping."""
MORE_STAGES = (2, 4)
"""How many times as many stages are tried."""


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
