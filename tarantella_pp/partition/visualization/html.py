"""The page of a plan: one HTML file, without scripts, that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.report import choice_lines
from tarantella_pp.partition.visualization.canvas.labels import (
    count,
    percent,
    seconds,
)
from tarantella_pp.partition.visualization.canvas.markup import Markup, tag
from tarantella_pp.partition.visualization.canvas.style_sheet import page_style
from tarantella_pp.partition.visualization.graph_drawing.drawing import graph_picture
from tarantella_pp.partition.visualization.html_tables import (
    MOST_ROWS,
    cut_table,
    operation_table,
    scrolling,
    stage_table,
    tiles,
)
from tarantella_pp.partition.visualization.memory_picture import memory_picture
from tarantella_pp.partition.visualization.replica_table import MOST_REPLICAS, replica_table
from tarantella_pp.partition.visualization.step_rows import StepBars
from tarantella_pp.partition.visualization.timeline_picture import MOST_BARS, timeline_picture

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_html(
    plan: Plan, graph: LayerGraph | None = None, timeline: StepBars | None = None
) -> str:
    """Makes the page of a plan: figures, stages, memory, timeline, layer graph and cuts."""
    title = f"Plan of '{plan.model}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(page_style())),
    )
    parts = [
        tag("h1", title),
        _summary(plan),
        tiles(plan, timeline),
        _stages(plan),
        tag("div", _memory(plan), _cuts(plan), class_="pair"),
        _timeline(plan, timeline),
        *_replicas(plan),
        _graph(plan, graph),
        _operations(plan, graph),
        _footer(plan),
    ]
    body = tag("body", tag("main", *parts))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _section(title: str, note: str, *children: Markup) -> Markup:
    return tag("section", tag("h2", title), tag("p", note), *children)


def _summary(plan: Plan) -> Markup:
    replicas = f", {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    return tag(
        "p",
        f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}"
        f"{replicas}, schedule {plan.schedule}. {' '.join(choice_lines(plan))}",
        class_="sub",
    )


def _stages(plan: Plan) -> Markup:
    note = (
        "Activations are what the backward pass needs again: micro-batches in flight × bytes of "
        "one. Working is what there is besides for a moment, buffers are what messages are "
        "received into. FLOPs are of the forward pass, per sample. Sends are of one micro-batch, "
        "forward."
    )
    if plan.recompute:
        which = ", ".join(map(str, plan.recompute))
        note += (
            f" Stages that keep their inputs only and repeat their forward pass: {which}; what "
            "follows + is what they make again."
        )
    if plan.except_last:
        which = ", ".join(map(str, plan.except_last))
        note += f" Those that keep all of the last micro-batch instead: {which}."
    return _section("Stages", note, scrolling(stage_table(plan), "Table of stages"))


def _memory(plan: Plan) -> Markup:
    limit = "no limit was set" if plan.memory_limit is None else "the dashed line is the limit"
    note = f"Planned peak of each stage; {limit}. Thin lines part the micro-batches in flight."
    picture = memory_picture(plan)
    return tag(
        "section",
        tag("h2", "Memory"),
        tag("p", note),
        scrolling(picture.inside(), "Memory of stages"),
        style=f"flex-basis:{picture.width + 40:.0f}px",
    )


def _cuts(plan: Plan) -> Markup:
    if not plan.cuts:
        return _section("Sent between stages", "Nothing: there is one stage.")
    note = "Tensors that cross stages, for one micro-batch, on each of their ways."
    if plan.ties:
        size = format_bytes(sum(tie.bytes for tie in plan.ties))
        note += (
            f" {count(len(plan.ties), 'weight')} of several stages, {size}: once a step gradients "
            "go to the first of them, and the new value back."
        )
    table = scrolling(cut_table(plan), "Table of tensors between stages", tall=True)
    return _section("Sent between stages", note, table)


def _timeline(plan: Plan, step: StepBars | None) -> Markup:
    if step is None:
        return _section("Timeline", "Not drawn, for the step was not simulated.")
    length = f"One step takes {seconds(step.length)}. " if step.in_seconds else ""
    replicas = ""
    if plan.num_replicas > 1:
        replicas = (
            f" All {plan.num_replicas:,} replicas do the same, and sum their gradients below: "
            f"{percent(step.exposed, step.length)} of the step waits for that alone."
        )
    note = (
        f"{length}Ranks wait {percent(step.bubble)} of the time: the bubble, striped.{replicas} "
        f"{step.note}"
    )
    if len(step.bars) > MOST_BARS:
        return _section("Timeline", f"{note} It has too many computations to be drawn.")
    return _section("Timeline", note, scrolling(timeline_picture(step).inside(), "Timeline"))


def _replicas(plan: Plan) -> Iterator[Markup]:
    """Which ranks are which, where there are several pipelines."""
    if plan.num_replicas > 1:
        size = format_bytes(plan.fusion_threshold)
        note = (
            f"Placement {plan.placement}. Gradients of a stage are summed down its column, in "
            f"buckets of up to {size}."
        )
        if plan.shard_optimizer:
            note += " Replicas share out the optimizer state; counted is the largest share."
        if plan.num_replicas > MOST_REPLICAS:
            note += f" The first {MOST_REPLICAS} of {plan.num_replicas:,} replicas."
        yield _section("Replicas", note, scrolling(replica_table(plan), "Ranks of replicas"))


def _graph(plan: Plan, graph: LayerGraph | None) -> Markup:
    note = (
        "Operations run from top to bottom; stages with many share boxes. Coloured lines are "
        "tensors sent between stages, with the bytes of one micro-batch. Point at anything for "
        "its details."
    )
    if graph is None:
        note += " Tensors within stages are known with the model only."
    picture = graph_picture(plan, graph).inside(fit=True)
    return _section("Layer graph", note, scrolling(picture, "Layer graph"))


def _operations(plan: Plan, graph: LayerGraph | None) -> Markup:
    total = len(plan.node_names)
    pieces = [tag("summary", f"All {count(total, 'operation')}")]
    if total > MOST_ROWS:
        pieces.append(tag("p", f"The first {MOST_ROWS:,}; the plan's file has all of them."))
    table = scrolling(operation_table(plan, graph), "Table of operations", tall=True)
    return tag("section", tag("details", *pieces, table))


def _footer(plan: Plan) -> Markup:
    lines = [f"Optimizer state is that of {plan.optimizer}."]
    if plan.assumed_size is not None:
        lines.append(f"Unknown dimensions are counted as {plan.assumed_size}.")
    if plan.estimated:
        lines.append(f"Costs are guesses for: {', '.join(plan.estimated)}.")
    lines.append(f"Fingerprint of the layer graph: {plan.fingerprint}")
    return tag("footer", " ".join(lines))
