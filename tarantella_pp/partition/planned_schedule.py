"""What a plan leaves to the search of a schedule, and what it learns of it in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import MeasuredPeak
from tarantella_pp.partition.plan.plan_simulation import with_step
from tarantella_pp.schedule import ScheduleSpec


def search_limits(plan: Plan) -> tuple[int, ...]:
    """Returns how many micro-batches a schedule that is searched for may hold on each stage.

    As many as the memory limit leaves room for; without a limit up to twice as many as there are
    stages, less one, with which no bubble is left: Qi et al., "Zero Bubble Pipeline Parallelism",
    ICLR 2024. Never fewer than planned.
    """
    bounds = []
    for i, stage in enumerate(plan.stages):
        bound = 2 * plan.num_stages - 1
        if plan.limits is not None:
            left = max(0, plan.limits[i] - stage.memory_bytes)
            bound = stage.in_flight + left // max(1, stage.activation_bytes)
        if i in plan.recompute:
            bound = stage.in_flight  # what waits for its weight gradients is not planned for
        bounds.append(min(plan.num_micro_batches, max(bound, stage.in_flight)))
    return tuple(bounds)


def with_findings(
    plan: Plan,
    spec: ScheduleSpec,
    fallbacks: Mapping[int, str],
    measured: Sequence[MeasuredPeak] = (),
) -> Plan:
    """Returns a plan with what training has shown, and nothing of a training before."""
    plan = msgspec.structs.replace(plan, measured=tuple(measured))
    if fallbacks:
        reasons = tuple(f"stage {stage}: {fallbacks[stage]}" for stage in sorted(fallbacks))
        plan = msgspec.structs.replace(plan, fallbacks=reasons)
    if spec.custom is None or plan.schedule_text is not None:
        return plan
    held = spec.in_flight(plan.num_micro_batches)
    stages = tuple(
        msgspec.structs.replace(stage, in_flight=count)
        for stage, count in zip(plan.stages, held, strict=True)
    )
    text = spec.custom.to_text()
    return with_step(msgspec.structs.replace(plan, stages=stages, schedule_text=text))
