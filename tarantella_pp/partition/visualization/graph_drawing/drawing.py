"""The layer graph: a column for each stage, and the bytes on every tensor between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.visualization.canvas.labels import count
from tarantella_pp.partition.visualization.canvas.markup import (
    Markup,
    join,
    number,
    tag,
)
from tarantella_pp.partition.visualization.canvas.palette import stage_class
from tarantella_pp.partition.visualization.canvas.picture import Picture
from tarantella_pp.partition.visualization.graph_drawing.boxes import Box
from tarantella_pp.partition.visualization.graph_drawing.layout import (
    BOX_HEIGHT,
    BOX_WIDTH,
    HEAD,
    LABEL_HEIGHT,
    LABEL_WIDTH,
    PAD,
    PITCH,
    Layout,
    Points,
    Route,
    lay_out,
    middle,
)
from tarantella_pp.partition.visualization.graph_drawing.outline import outline


def graph_picture(plan: Plan, graph: LayerGraph | None = None) -> Picture:
    """Draws the operations of a plan, stage by stage, and what is sent between stages."""
    shown = outline(plan, graph)
    layout = lay_out(shown)
    pieces = []
    for stage, boxes in enumerate(shown.columns):
        pieces.append(_panel(plan, stage, len(boxes), layout))
    pieces += [_route(route) for route in layout.routes]
    for stage, boxes in enumerate(shown.columns):
        pieces.append(_lines(layout.links[stage], "link"))
        pieces += [_box(box, stage, row, layout) for row, box in enumerate(boxes)]
    pieces += [_label(route) for route in layout.routes]
    text = (
        f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}, "
        f"{count(len(plan.cuts), 'tensor')} sent between stages"
    )
    return Picture(layout.width, layout.height, join(pieces), text)


def _panel(plan: Plan, stage: int, rows: int, layout: Layout) -> Markup:
    left, width = layout.columns[stage]
    colour = stage_class(stage)
    details = plan.stages[stage]
    note = f"{count(details.nodes, 'operation')} · {format_bytes(details.memory_bytes)}"
    return tag(
        "g",
        tag(
            "rect",
            class_=f"panel s{colour}",
            x=left,
            y=layout.top,
            width=width,
            height=HEAD + rows * PITCH,
            rx=9,
        ),
        tag("rect", class_=f"f{colour}", x=left, y=layout.top, width=width, height=5, rx=2.5),
        tag("text", f"Stage {stage}", class_="strong", x=left + PAD, y=layout.top + 22),
        tag("text", note, class_="muted", x=left + PAD, y=layout.top + 37),
    )


def _box(box: Box, stage: int, row: int, layout: Layout) -> Markup:
    x, y = layout.boxes[stage], middle(layout.top, row) - BOX_HEIGHT / 2
    shapes = []
    if box.role == "run":
        shapes.append(
            tag("rect", class_="box", x=x + 3, y=y + 3, width=BOX_WIDTH, height=BOX_HEIGHT, rx=5)
        )
    end = box.role == "end"
    shapes.append(
        tag(
            "rect",
            class_="box end" if end else "box",
            x=x,
            y=y,
            width=BOX_WIDTH,
            height=BOX_HEIGHT,
            rx=BOX_HEIGHT / 2 if end else 5,
        )
    )
    if not end:
        colour = stage_class(stage)
        shapes.append(
            tag("rect", class_=f"f{colour}", x=x, y=y + 4, width=4, height=BOX_HEIGHT - 8, rx=2)
        )
    at = x + (16 if end else 11)
    return tag(
        "g",
        tag("title", box.hover),
        *shapes,
        tag("text", box.title, x=at, y=y + 15),
        tag("text", box.note, class_="muted small", x=at, y=y + 29),
    )


def _route(route: Route) -> Markup:
    return tag("g", tag("title", _hover(route)), _lines(route.paths, f"cut k{_colour(route)}"))


def _label(route: Route) -> Markup:
    x, y = route.label
    return tag(
        "g",
        tag("title", _hover(route)),
        tag(
            "rect",
            class_=f"pill s{_colour(route)}",
            x=x,
            y=y - LABEL_HEIGHT / 2,
            width=LABEL_WIDTH,
            height=LABEL_HEIGHT,
            rx=LABEL_HEIGHT / 2,
        ),
        tag(
            "text",
            format_bytes(route.cut.bytes),
            class_="middle",
            x=x + LABEL_WIDTH / 2,
            y=y + 4,
        ),
    )


def _colour(route: Route) -> int:
    return stage_class(route.cut.source[0])


def _hover(route: Route) -> str:
    lines = []
    for tensor in route.cut.tensors[:16]:
        stages = ", ".join(map(str, tensor.targets))
        extra = f" + mask of {format_bytes(tensor.mask_bytes)}" if tensor.mask_bytes else ""
        lines.append(
            f"{tensor.tensor}: stage {tensor.source} to {stages}, "
            f"{format_bytes(tensor.bytes)} of {tensor.dtype}{extra}"
        )
    more = len(route.cut.tensors) - len(lines)
    return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def _lines(paths: Iterable[Points], class_: str) -> Markup:
    """Lines with round corners and an arrow at their ends."""
    drawn = list(paths)
    if not drawn:
        return Markup()
    lines = " ".join(_rounded(points) for points in drawn)
    heads = " ".join(_arrow(points) for points in drawn)
    name = class_.rpartition(" ")[2]
    head = f"f{name[1:]}" if name.startswith("k") else "head"
    return join([tag("path", class_=class_, d=lines), tag("path", class_=head, d=heads)])


def _rounded(points: Sequence[tuple[float, float]], radius: float = 5) -> str:
    commands = [f"M{_at(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        commands.append(f"L{_at(_towards(corner, before, radius))}")
        commands.append(f"Q{_at(corner)} {_at(_towards(corner, after, radius))}")
    return "".join([*commands, f"L{_at(points[-1])}"])


def _towards(
    start: tuple[float, float], end: tuple[float, float], most: float
) -> tuple[float, float]:
    """The point so far from the start of a line, or its middle where that comes first."""
    length = abs(end[0] - start[0]) + abs(end[1] - start[1])
    share = min(most, length / 2) / length if length else 0.0
    return (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))


def _arrow(points: Sequence[tuple[float, float]]) -> str:
    (x, y), (from_x, _) = points[-1], points[-2]
    if from_x == x:
        return f"M{_at((x - 3.5, y - 6))}L{_at((x + 3.5, y - 6))}L{_at((x, y))}Z"
    return f"M{_at((x - 6, y - 3.5))}L{_at((x - 6, y + 3.5))}L{_at((x, y))}Z"


def _at(point: tuple[float, float]) -> str:
    return f"{number(point[0])} {number(point[1])}"
