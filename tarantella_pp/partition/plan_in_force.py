"""What a plan comes to for the batch that is trained, and for what is computed of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.costs.gradient_sums import GradientSums
from tarantella_pp.partition.costs.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_config import NarrowDtype, micro_batch_size
from tarantella_pp.partition.plan.plan_parts import (
    CutEdge,
    OutputUse,
    StagePlan,
)
from tarantella_pp.partition.plan.plan_simulation import with_step
from tarantella_pp.schedule import held_whole_bounds, send_window

_GROWING = (
    *("activation_bytes", "recomputed_bytes", "working_bytes", "buffer_bytes"),
    "reduction_bytes",  # of the rows that are looked up in embeddings
)


def plan_in_force(
    plan: Plan,
    graph: LayerGraph,
    batch_size: int,
    outputs: OutputUse,
    in_flight: Sequence[int] | None = None,
) -> Plan:
    """Returns a plan with the figures of another batch.

    What the planner's rules say of the difference is added to the figures of the plan, which may
    come from measurements. With `in_flight` micro-batches all forwards come first.
    """
    schedule = plan.schedule if in_flight is None else "gpipe"
    planned = tuple(stage.in_flight for stage in plan.stages)
    again = _repeats(plan)
    window = send_window(plan.schedule, plan.num_stages, plan.num_ranks)
    before, _ = _figures(plan, graph, plan.batch_size, planned, again, plan.outputs, window)
    held = planned
    if in_flight is not None:
        held = tuple(in_flight)
        counts = held_whole_bounds(
            schedule, plan.num_stages, plan.num_micro_batches, plan.except_last
        )
        again = {stage: counts[stage] for stage in plan.recompute}
    window = send_window(schedule, plan.num_stages, plan.num_ranks)
    now, cuts = _figures(plan, graph, batch_size, held, again, outputs, window)
    longer = batch_size / plan.batch_size
    stages = []
    for stage, old, new, count in zip(plan.stages, before, now, held, strict=True):
        changes: dict[str, object] = {"in_flight": count, **_changed(stage, old, new)}
        if stage.seconds is not None and batch_size != plan.batch_size:
            for name in ("forward_seconds", "backward_seconds"):
                changes[name] = longer * getattr(stage, name)
        stages.append(msgspec.structs.replace(stage, **changes))
    return msgspec.structs.replace(
        plan,
        batch_size=batch_size,
        stages=tuple(stages),
        cuts=cuts,
        outputs=outputs,
        schedule=schedule,
    )


def sent_as(plan: Plan, graph: LayerGraph, wire_dtype: NarrowDtype | None) -> Plan:
    """Returns a plan with the memory and the step of messages that travel in another type.

    Args:
        plan: The plan.
        graph: The layer graph that it is for.
        wire_dtype: As of a plan.

    Raises:
        PlanError: It is a plan of another model.
    """
    if wire_dtype == plan.wire_dtype:
        return plan
    plan.check(graph)
    narrow = msgspec.structs.replace(plan, wire_dtype=wire_dtype)
    held, again = tuple(stage.in_flight for stage in plan.stages), _repeats(plan)
    window = send_window(plan.schedule, plan.num_stages, plan.num_ranks)
    figures = [
        _figures(one, graph, plan.batch_size, held, again, plan.outputs, window)[0]
        for one in (plan, narrow)
    ]
    stages = tuple(
        msgspec.structs.replace(stage, **_changed(stage, old, new))
        for stage, old, new in zip(plan.stages, *figures, strict=True)
    )
    return with_step(msgspec.structs.replace(narrow, stages=stages))


def _changed(stage: StagePlan, old: StagePlan, new: StagePlan) -> dict[str, int]:
    """What grows with batches and messages, by as much as the rules say."""
    return {
        name: max(0, getattr(stage, name) + getattr(new, name) - getattr(old, name))
        for name in _GROWING
    }


def check_limit(plan: Plan, planned_for: int) -> None:
    """Refuses a batch for which a stage needs more memory than it may have."""
    for i, (stage, limit) in enumerate(zip(plan.stages, plan.limits or (), strict=False)):
        if stage.memory_bytes > limit:
            kept = plan.outputs.at_once if plan.outputs is not None else None
            why = f" ({kept})" if kept else ""
            other = f"batch_size={plan.batch_size}, which plans for it, train smaller batches"
            if plan.batch_size == planned_for:
                other = "a smaller batch_size and train such batches"
            raise PlanError(
                f"Stage {i} would need {stage.memory_bytes} bytes "
                f"({format_bytes(stage.memory_bytes)}) for a batch of {plan.batch_size} samples"
                f"{why}. Received: memory_limit={limit} bytes ({format_bytes(limit)}), in a plan "
                f"for batch_size={planned_for}. Make the PipelineModel with "
                f"{other}, or allow more memory."
            )


def _repeats(plan: Plan) -> dict[int, int]:
    """Stages that repeat their forward pass, and for how many micro-batches at a time."""
    if not plan.recompute:
        return {}
    counts = plan.schedule_spec().held_whole(plan.num_micro_batches, plan.except_last)
    return {stage: counts[stage] for stage in plan.recompute}


def _figures(
    plan: Plan,
    graph: LayerGraph,
    batch_size: int,
    in_flight: tuple[int, ...],
    repeats: Mapping[int, int],
    outputs: OutputUse | None,
    window: int | None,
) -> tuple[tuple[StagePlan, ...], tuple[CutEdge, ...]]:
    """What the planner's rules say of the stages of a plan."""
    count = plan.num_micro_batches
    rows = micro_batch_size(batch_size, min(plan.num_replicas, batch_size), count)
    costs = StageCostModel(
        graph, optimizer_state_bytes(None, graph.weights), rows, None, count, outputs,
        shards=plan.shards, ranks=plan.ranks, window=window, sums=GradientSums.of(plan),
        wire_dtype=plan.wire_dtype,
    )  # fmt: skip
    return costs.stages(plan.assignment, in_flight, repeats), costs.cuts(plan.assignment)
