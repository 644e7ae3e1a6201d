"""The figures and tables of the page: stages, cuts and operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import (
    Plan,
    StagePlan,
)
from tarantella_pp.partition.visualization.canvas.labels import (
    count,
    flops,
    percent,
    seconds,
)
from tarantella_pp.partition.visualization.canvas.markup import Markup, tag
from tarantella_pp.partition.visualization.canvas.palette import PARTS, stage_class
from tarantella_pp.partition.visualization.memory_picture import parts
from tarantella_pp.partition.visualization.step_rows import StepBars

MOST_ROWS = 5000
"""Most rows of a table; who needs more reads the plan itself."""


def scrolling(child: Markup, label: str, *, tall: bool = False) -> Markup:
    """Puts something wide into a box of its own that scrolls, with the keyboard as well."""
    return tag(
        "div",
        child,
        class_="scroll tall" if tall else "scroll",
        role="region",
        aria_label=label,
        tabindex="0",
    )


def chip(stage: int) -> Markup:
    """Returns the number of a stage on its colour."""
    return tag("span", str(stage), class_=f"chip c{stage_class(stage)}")


def stage_table(plan: Plan) -> Markup:
    """Returns the table of stages."""
    heads = ["Stage", "Operations", "Number", "Weights", "Gradients", "Optimizer"]
    heads += ["Activations", "Working", "Buffers", "Memory", "FLOPs", "Sends"]
    limited = plan.limits is not None
    if limited:
        heads.insert(10, "Of limit")
    work = sum(stage.flops for stage in plan.stages)
    body = []
    for i, stage in enumerate(plan.stages):
        cells: list[str] = [chip(i), _span(stage), f"{stage.nodes:,}", *_memory(stage)]
        if plan.limits is not None:
            cells.append(_of_limit(stage.memory_bytes, plan.limits[i]))
        cells.append(f"{percent(stage.flops, work)} · {flops(stage.flops)}")
        cells.append(_sends(plan, i))
        body.append(_row(cells))
    return _table(heads, body, _row(_totals(plan, limited), head=True))


def cut_table(plan: Plan) -> Markup:
    """Returns the table of tensors that are sent between stages."""
    body = []
    for cut in plan.cuts[:MOST_ROWS]:
        path = tag("span", chip(cut.source), " → ", *_chips(cut.targets))
        mask = f" + mask {format_bytes(cut.mask_bytes)}" if cut.mask_bytes else ""
        back = "yes" if cut.has_gradient else "no"
        size = f"{format_bytes(cut.bytes)}{mask}"
        body.append(_row([path, cut.tensor, size, cut.dtype, back]))
    return _table(["Stages", "Tensor", "Bytes", "Type", "Gradient"], body)


def operation_table(plan: Plan, graph: LayerGraph | None) -> Markup:
    """Returns the table of all operations."""
    heads = ["Stage", "Operation"] + (["Kind", "Weights", "FLOPs"] if graph else [])
    body = []
    for i, name in enumerate(plan.node_names[:MOST_ROWS]):
        cells: list[str] = [chip(plan.assignment[i]), name]
        if graph is not None:
            node = graph.nodes[i]
            size = node.parameters + node.constants
            cells += [node.kind, format_bytes(size) if size else "-", flops(node.flops)]
        body.append(_row(cells))
    return _table(heads, body)


def _table(heads: Sequence[str], body: Iterable[Markup], foot: Markup | None = None) -> Markup:
    cells = [
        tag("th", head, scope="col", class_="name" if i == 1 else None)
        for i, head in enumerate(heads)
    ]
    pieces = [tag("thead", tag("tr", *cells)), tag("tbody", *body)]
    return tag("table", *pieces, *([tag("tfoot", foot)] if foot else []))


def _row(cells: Sequence[str], *, head: bool = False) -> Markup:
    """A row; its second cell holds names."""
    return tag(
        "tr",
        *(
            tag("th" if head and not i else "td", cell, class_="name" if i == 1 else None)
            for i, cell in enumerate(cells)
        ),
    )


def _span(stage: StagePlan) -> str:
    if stage.nodes == 1:
        return stage.first
    return tag("span", stage.first, " …", tag("br"), stage.last)


def _memory(stage: StagePlan) -> list[str]:
    sizes = {name: format_bytes(size) for name, size in parts(stage).items()}
    kept = f"{stage.in_flight} × {format_bytes(stage.activation_bytes)}"
    again = sizes.pop("recomputed")
    sizes["activations"] = f"{kept} + {again}" if stage.recomputed_bytes else kept
    return [*sizes.values(), format_bytes(stage.memory_bytes)]


def _of_limit(size: int, limit: int) -> Markup:
    return tag("span", percent(size, limit), class_="over" if size > limit else None)


def _sends(plan: Plan, stage: int | None = None) -> str:
    """What a stage, or all of them, send forward for one micro-batch."""
    sent = plan.sent_bytes(stage)
    return format_bytes(sent) if sent else "-"


def _totals(plan: Plan, limited: bool) -> list[str]:
    sums = {part: sum(parts(stage)[part] for stage in plan.stages) for part in PARTS}
    sums["activations"] += sums.pop("recomputed")
    memory = sum(stage.memory_bytes for stage in plan.stages)
    return [
        "All",
        "",
        f"{len(plan.node_names):,}",
        *map(format_bytes, sums.values()),
        format_bytes(memory),
        *([""] if limited else []),
        flops(sum(stage.flops for stage in plan.stages)),
        _sends(plan),
    ]


def _chips(stages: Iterable[int]) -> Iterable[Markup]:
    for i, stage in enumerate(stages):
        if i:
            yield Markup(" ")
        yield chip(stage)


def tiles(plan: Plan, timeline: StepBars | None) -> Markup:
    """Returns what one looks for first."""
    shown: list[tuple[str, str, str]] = [
        ("Largest stage", *_largest(plan)),
        (f"Balanced by {plan.balance}", *_verdict(plan)),
        ("Bubble", *_bubble(plan, timeline)),
        ("Batch", *_batch(plan)),
        ("Ranks", *_ranks(plan, timeline)),
        ("Sent forward", *_sent(plan)),
    ]
    return tag("dl", *(_tile(*tile) for tile in shown), class_="tiles")


def _tile(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", note)))


def _largest(plan: Plan) -> tuple[str, str]:
    sizes = [stage.memory_bytes for stage in plan.stages]
    if plan.limits is None:
        return format_bytes(max(sizes)), "no limit"
    # Of unequal devices, the one that is fullest.
    pairs = zip(sizes, plan.limits, strict=True)
    size, limit = max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))
    note = f"{percent(size, limit)} of {format_bytes(limit)}"
    over = size > limit
    return (tag("span", format_bytes(size), class_="over") if over else format_bytes(size)), note


def _verdict(plan: Plan) -> tuple[str, str]:
    """How good the plan is known to be."""
    proof = plan.certificate
    value, bound = (
        f"{flops(v)} per sample" if plan.balance == "flops" else format_bytes(v)
        for v in (proof.value, proof.lower_bound)
    )
    if proof.optimal:
        return "optimal", f"{value}, proven by {proof.method} in {seconds(proof.seconds)}"
    if proof.gap is None:
        return value, f"no lower bound ({proof.method})"
    return f"gap ≤ {100 * proof.gap:.2g} %", f"{value}, no plan is below {bound} ({proof.method})"


def _bubble(plan: Plan, timeline: StepBars | None) -> tuple[str, str]:
    found = plan.bubble if timeline is None else timeline.bubble
    return ("-", "not simulated") if found is None else (percent(found), "simulated")


def _batch(plan: Plan) -> tuple[str, str]:
    parts = count(plan.num_micro_batches, "micro-batch", "micro-batches")
    return f"{plan.batch_size:,}", f"{parts} of {count(plan.micro_batch_size, 'sample')}"


def _ranks(plan: Plan, timeline: StepBars | None) -> tuple[str, str]:
    replicas = count(plan.num_replicas, "replica")
    own = plan.num_ranks if timeline is None else len(timeline.rank_names)
    return f"{own * plan.num_replicas:,}", f"{count(plan.num_stages, 'stage')} × {replicas}"


def _sent(plan: Plan) -> tuple[str, str]:
    narrow = "" if plan.wire_dtype is None else f", as {plan.wire_dtype}"
    note = f"{count(len(plan.cuts), 'tensor')}, per micro-batch{narrow}"
    return format_bytes(plan.sent_bytes()), note
