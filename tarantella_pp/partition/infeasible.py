"""What to say where no plan keeps a memory limit: the smallest that works, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.given_balance import GIVEN
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_config import common_limit
from tarantella_pp.partition.plan_search import PlanSearch, largest_stage

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
        f"Received: memory_limit={plan_search.given['memory_limit']!r}. The smallest {known} is "
        f"{size} bytes ({format_bytes(size)}), with num_micro_batches={least.num_micro_batches}, "
        f"recompute={least.recompute}.{advice}"
    )


def _alternatives(plan_search: PlanSearch) -> Iterator[tuple[str, Plan]]:
    """Yields options that were given, or stages, in another way, and the least plan with them."""
    fixed = [o for o in ("num_micro_batches", "recompute") if plan_search.given[o] is not None]
    for option in fixed:
        plan = replace(
            plan_search, given={**plan_search.given, option: None}
        ).smallest_memory_plan()
        yield f"{option}={getattr(plan, option)}", plan
    stages_fixed = plan_search.spec.custom is not None or plan_search.given["balance"] == GIVEN
    for times in () if stages_fixed else MORE_STAGES:
        spec = replace(
            plan_search.spec,
            num_stages=times * plan_search.spec.num_stages,
            num_ranks=times * plan_search.spec.num_ranks,
        )
        given = {**plan_search.given, "num_stages": spec.num_stages}
        try:
            yield (
                f"num_stages={spec.num_stages}",
                replace(plan_search, given=given, spec=spec).smallest_memory_plan(),
            )
        except (ConfigurationError, PlanError):  # more than there are operations to part
            return
