"""What a plan comes to for another batch, or another loss."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import (
    CutEdge,
    OutputUse,
    StagePlan,
)
from tarantella_pp.partition.plan.stage_costs import StageCostModel

# What grows with batches and messages.
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
    """Returns a plan for another batch; with `in_flight` all forward passes come first.

    What the rules say of the change comes on top of the plan's own figures, for these may be
    measured. What stages hold is as planned, unless it is given.
    """
    longer = batch_size / plan.batch_size
    gpipe = {} if in_flight is None else {"schedule": "gpipe", "schedule_text": None}
    changed = msgspec.structs.replace(plan, batch_size=batch_size, outputs=outputs, **gpipe)
    planned = tuple(stage.in_flight for stage in plan.stages)
    before, _ = _figures(plan, graph, planned)
    now, cuts = _figures(changed, graph, planned if in_flight is None else tuple(in_flight))
    stages = []
    for stage, old, new in zip(plan.stages, before, now, strict=True):
        more = {name: getattr(new, name) - getattr(old, name) for name in _GROWING}
        sizes = {name: max(0, getattr(stage, name) + size) for name, size in more.items()}
        stages.append(
            msgspec.structs.replace(_longer(stage, longer), in_flight=new.in_flight, **sizes)
        )
    return msgspec.structs.replace(changed, stages=tuple(stages), cuts=cuts)


def _longer(stage: StagePlan, times: float) -> StagePlan:
    """What a stage takes for larger micro-batches, where that was measured."""
    if stage.forward_seconds is None or stage.backward_seconds is None:
        return stage
    forward, backward = times * stage.forward_seconds, times * stage.backward_seconds
    return msgspec.structs.replace(stage, forward_seconds=forward, backward_seconds=backward)


def _figures(
    plan: Plan, graph: LayerGraph, in_flight: tuple[int, ...]
) -> tuple[tuple[StagePlan, ...], tuple[CutEdge, ...]]:
    """What the planner's rules say of the stages of a plan."""
    slots = [2 * weight.bytes * weight.trainable for weight in graph.weights]  # Adam's
    costs = StageCostModel(graph, slots, plan, outputs=plan.outputs)
    return costs.stages(plan.assignment, in_flight, plan.repeats), costs.cuts(plan.assignment)


def ways_to_less_memory(plan: Plan) -> str:
    """Which options of a plan would take less memory."""
    ways = ["smaller batches", "more stages"]
    if plan.num_micro_batches < plan.batch_size:
        ways.append("more micro-batches")
    if len(plan.recompute) < plan.num_stages:
        ways.append("recompute='all'")
    if plan.num_replicas > 1 and not plan.shard_optimizer:
        ways.append("shard_optimizer=True")
    return f"Less is needed with {', '.join(ways[:-1])} or {ways[-1]}."
