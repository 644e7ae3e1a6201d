"""The tables of the page: stages, cuts and operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.pictures.markup import Markup, tag
from tarantella_pp.partition.pictures.memory_picture import parts
from tarantella_pp.partition.pictures.palette import PARTS, stage_class
from tarantella_pp.partition.pictures.words import flops, percent
from tarantella_pp.partition.plan import CutEdge, Plan, StagePlan
from tarantella_pp.partition.sizes import format_bytes

MOST_ROWS = 5000
"""Most rows of a table; who needs more reads the plan itself."""


def scrolling(child: Markup, label: str, *, tall: bool = False) -> Markup:
    """Puts something wide into a box of its own that scrolls, with the keyboard as well.

    Args:
        child: What may be wide.
        label: What it is.
        tall: Whether it may be tall as well.
    """
    return tag(
        "div",
        child,
        class_="scroll tall" if tall else "scroll",
        role="region",
        aria_label=label,
        tabindex="0",
    )


def chip(stage: int) -> Markup:
    """Returns the number of a stage on its colour.

    Args:
        stage: The stage.
    """
    return tag("span", str(stage), class_=f"chip c{stage_class(stage)}")


def stage_table(plan: Plan) -> Markup:
    """Returns the table of stages.

    Args:
        plan: The plan.
    """
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
        cells.append(_sends(plan.cuts, i))
        body.append(_row(cells))
    return _table(heads, body, _row(_totals(plan, limited), head=True))


def cut_table(plan: Plan) -> Markup:
    """Returns the table of tensors that are sent between stages.

    Args:
        plan: The plan.
    """
    body = []
    for cut in plan.cuts[:MOST_ROWS]:
        path = tag("span", chip(cut.source), " → ", *_chips(cut.targets))
        mask = f" + mask {format_bytes(cut.mask_bytes)}" if cut.mask_bytes else ""
        back = "yes" if cut.has_gradient else "no"
        size = f"{format_bytes(cut.bytes)}{mask}"
        body.append(_row([path, cut.tensor, size, cut.dtype, back]))
    return _table(["Stages", "Tensor", "Bytes", "Type", "Gradient"], body)


def operation_table(plan: Plan, graph: LayerGraph | None) -> Markup:
    """Returns the table of all operations.

    Args:
        plan: The plan.
        graph: The model's layer graph. Default: names and stages only.
    """
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


def _sends(cuts: Iterable[CutEdge], stage: int) -> str:
    """What a stage sends forward for one micro-batch."""
    sent = sum((c.bytes + c.mask_bytes) * len(c.targets) for c in cuts if c.source == stage)
    return format_bytes(sent) if sent else "-"


def _totals(plan: Plan, limited: bool) -> list[str]:
    sums = {part: sum(parts(stage)[part] for stage in plan.stages) for part in PARTS}
    sums["activations"] += sums.pop("recomputed")
    memory = sum(stage.memory_bytes for stage in plan.stages)
    sent = sum((cut.bytes + cut.mask_bytes) * len(cut.targets) for cut in plan.cuts)
    return [
        "All",
        "",
        f"{len(plan.node_names):,}",
        *map(format_bytes, sums.values()),
        format_bytes(memory),
        *([""] if limited else []),
        flops(sum(stage.flops for stage in plan.stages)),
        format_bytes(sent) if sent else "-",
    ]


def _chips(stages: Iterable[int]) -> Iterable[Markup]:
    for i, stage in enumerate(stages):
        if i:
            yield Markup(" ")
        yield chip(stage)
