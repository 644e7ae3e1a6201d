"""What a plan comes to for another batch, another loss, or messages of another type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.peak_memory import GradientSums
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import (
    CutEdge,
    NarrowDtype,
    OutputUse,
    StagePlan,
    micro_batch_size,
)
from tarantella_pp.partition.plan.plan_simulation import with_step
from tarantella_pp.partition.stage_costs import StageCostModel
from tarantella_pp.schedule import held_whole_bounds, send_window

_GROWING = (
    *("activation_bytes", "recomputed_bytes", "working_bytes", "buffer_bytes"),
    "reduction_bytes",  # of the rows that are looked up in embeddings
)


def with_batch(
    plan: Plan,
    graph: LayerGraph,
    batch_size: int,
    outputs: OutputUse,
    in_flight: Sequence[int] | None = None,
) -> Plan:
    """Returns a plan for another batch; with `in_flight` all forward passes come first."""
    longer = batch_size / plan.batch_size
    changed = msgspec.structs.replace(
        plan,
        batch_size=batch_size,
        stages=tuple(_longer(stage, longer) for stage in plan.stages),
        outputs=outputs,
        schedule=plan.schedule if in_flight is None else "gpipe",
    )
    if in_flight is None:
        return _recounted(plan, changed, graph)
    counts = held_whole_bounds("gpipe", plan.num_stages, plan.num_micro_batches, plan.except_last)
    again = {stage: counts[stage] for stage in plan.recompute}
    return _recounted(plan, changed, graph, in_flight, again)


def sent_as(plan: Plan, graph: LayerGraph, dtype: NarrowDtype | None) -> Plan:
    """Returns a plan whose messages travel in another type, if one is given."""
    if dtype in (None, plan.wire_dtype):
        return plan
    plan.check(graph)
    narrow = msgspec.structs.replace(plan, wire_dtype=dtype)
    return with_step(_recounted(plan, narrow, graph))


def _longer(stage: StagePlan, times: float) -> StagePlan:
    """What a stage takes for larger micro-batches, where that was measured."""
    if stage.forward_seconds is None or stage.backward_seconds is None:
        return stage
    forward, backward = times * stage.forward_seconds, times * stage.backward_seconds
    return msgspec.structs.replace(stage, forward_seconds=forward, backward_seconds=backward)


def _recounted(
    plan: Plan,
    changed: Plan,
    graph: LayerGraph,
    in_flight: Sequence[int] | None = None,
    repeats: Mapping[int, int] | None = None,
) -> Plan:
    """Gives a plan that was changed its figures.

    What the rules say of the change comes on top of the plan's own figures, for these may be
    measured. What stages hold and repeat is as planned, unless it is given.
    """
    planned, again = tuple(stage.in_flight for stage in plan.stages), _repeats(plan)
    held = planned if in_flight is None else tuple(in_flight)
    before, _ = _figures(plan, graph, planned, again)
    now, cuts = _figures(changed, graph, held, again if repeats is None else repeats)
    stages = tuple(
        msgspec.structs.replace(stage, in_flight=count, **_changed(stage, old, new))
        for stage, old, new, count in zip(changed.stages, before, now, held, strict=True)
    )
    return msgspec.structs.replace(changed, stages=stages, cuts=cuts)


def _changed(stage: StagePlan, old: StagePlan, new: StagePlan) -> dict[str, int]:
    """What grows with batches and messages, by as much as the rules say."""
    return {
        name: max(0, getattr(stage, name) + getattr(new, name) - getattr(old, name))
        for name in _GROWING
    }


def _repeats(plan: Plan) -> dict[int, int]:
    """Stages that repeat their forward pass, and for how many micro-batches at a time."""
    if not plan.recompute:
        return {}
    counts = plan.schedule_spec().held_whole(plan.num_micro_batches, plan.except_last)
    return {stage: counts[stage] for stage in plan.recompute}


def _figures(
    plan: Plan, graph: LayerGraph, in_flight: tuple[int, ...], repeats: Mapping[int, int]
) -> tuple[tuple[StagePlan, ...], tuple[CutEdge, ...]]:
    """What the planner's rules say of the stages of a plan."""
    count, batch_size = plan.num_micro_batches, plan.batch_size
    costs = StageCostModel(
        graph,
        optimizer_state_bytes(None, graph.weights),
        micro_batch_size(batch_size, min(plan.num_replicas, batch_size), count),
        micro_batches=count,
        outputs=plan.outputs,
        shards=plan.shards,
        ranks=plan.ranks,
        window=send_window(plan.schedule, plan.num_stages, plan.num_ranks),
        sums=GradientSums.of(plan),
        sent_as=plan.wire_dtype,
    )
    return costs.stages(plan.assignment, in_flight, repeats), costs.cuts(plan.assignment)


def ways_to_less_memory(plan: Plan) -> str:
    """Which options of a plan would take less memory."""
    ways = ["smaller batches", "more stages"]
    if plan.num_micro_batches < plan.batch_size:
        ways.append("more micro-batches")
    if len(plan.recompute) < plan.num_stages or plan.except_last:
        ways.append("recompute='all'")
    if plan.num_replicas > 1 and not plan.shard_optimizer:
        ways.append("shard_optimizer=True")
    return f"Less is needed with {', '.join(ways[:-1])} or {ways[-1]}."
