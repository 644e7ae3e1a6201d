"""The layer graph in a PNG file: the boxes and lines of its layout, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.visualization.canvas.palette import LIGHT, stage_class
from tarantella_pp.partition.visualization.graph_drawing.layout import (
    BOX_HEIGHT,
    BOX_WIDTH,
    HEAD,
    PAD,
    PITCH,
    Layout,
    Points,
    middle,
)
from tarantella_pp.partition.visualization.graph_drawing.outline import Outline

PIXELS = 100.0
"""Of the layout, in an inch."""
_TEXT = 6.3


def draw_graph(axes: Any, plan: Plan, shown: Outline, layout: Layout, scale: float) -> None:
    """Draws stages as columns of boxes, and what is sent between them."""
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height, 0)
    axes.set_aspect("equal", anchor="W")
    axes.set_axis_off()
    title = "Layer graph, with the bytes of one micro-batch that stages send"
    axes.set_title(title, loc="left", fontsize=10)
    size = _TEXT * scale
    for stage, boxes in enumerate(shown.columns):
        colour = LIGHT.stages[stage_class(stage)]
        left, width = layout.columns[stage]
        _rectangle(axes, left, layout.top, width, HEAD + len(boxes) * PITCH, colour, 0.09)
        memory = format_bytes(plan.stages[stage].memory_bytes)
        head = {"color": colour, "fontsize": size, "fontweight": "bold", "va": "center"}
        axes.text(left + PAD, middle(layout.top, -1), f"Stage {stage} · {memory}", **head)
        for points in layout.links[stage]:
            _line(axes, points, LIGHT.muted, scale)
        for row, box in enumerate(boxes):
            x, y = layout.boxes[stage], middle(layout.top, row)
            _rectangle(axes, x, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, LIGHT.muted, 0.0)
            text = {"family": "monospace", "va": "center", "parse_math": False}
            axes.text(x + 8, y - 7, box.title, fontsize=size, color=LIGHT.text, **text)
            axes.text(x + 8, y + 8, box.note, fontsize=0.85 * size, color=LIGHT.muted, **text)
    for route in layout.routes:
        colour = LIGHT.stages[stage_class(route.cut.source[0])]
        for points in route.paths:
            _line(axes, points, colour, 1.5 * scale)
        pill = {"facecolor": LIGHT.card, "edgecolor": colour, "boxstyle": "round,pad=0.2"}
        label = {"fontsize": 0.85 * size, "va": "center", "bbox": pill}
        axes.text(*route.label, format_bytes(route.cut.bytes), color=LIGHT.text, **label)


def _rectangle(
    axes: Any, x: float, y: float, width: float, height: float, colour: str, alpha: float
) -> None:
    """A frame in a colour, filled with a shade of it, or with white."""
    from matplotlib.patches import Rectangle

    face = (*_rgb(colour), alpha) if alpha else LIGHT.card
    look: dict[str, Any] = {"facecolor": face, "edgecolor": colour, "linewidth": 0.6}
    axes.add_patch(Rectangle((x, y), width, height, **look))


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _line(axes: Any, points: Points, colour: str, width: float) -> None:
    """A line with corners, and an arrow at its end."""
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8 * width)
    arrow = {"arrowstyle": "->", "color": colour, "linewidth": 0.8 * width, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=arrow)
