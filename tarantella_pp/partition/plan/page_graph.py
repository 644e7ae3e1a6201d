"""The stages on the page of a plan: a column of operations for each, and what is sent between them.

Operations stand below each other in the order in which they run. Nothing ever crosses a box:

      rail ------------------------------+        tensors that skip stages run over the columns
      |  stage 0          stage 1        |  stage 2
      |  +-----+          +-----+        |  +-----+
     -+--| box |--bytes-->|     |--bytes-+->|     |    those for the next stage run between columns
         +-----+          +-----+           +-----+
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from tarantella_pp.partition.graph.units import count, format_bytes
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import CutEdge

# Most boxes of a stage; more operations share boxes.
MOST_BOXES = 24
# What fits in a box, and most lines of the note that is shown when one points at something.
TITLE_CHARACTERS, MOST_LINES = 23, 16
# Pixels: a column has room for labels behind it.
BOX_WIDTH, BOX_HEIGHT, PITCH = 186, 36, 48
HEAD, MARGIN, LEFT, RIGHT, GAP = 50, 6, 10, 10, 120
LABEL_WIDTH, LABEL_HEIGHT = 70, 20
# Tensors that skip stages have lanes above the columns.
LANE, MOST_LANES = 7, 12


class Box(NamedTuple):
    """An operation, or a run of them."""

    title: str
    note: str
    hover: str


def graph_drawing(plan: PlanData) -> dict[str, Any]:
    """Returns the drawing."""
    boxes, rows = _boxes(plan)
    sent = _sent_from(plan, rows)
    skipping = [
        source for source, cuts in sent.items() if max(_targets(cuts), default=0) > source[0] + 1
    ]
    rails = {source: MARGIN + LANE * (i % MOST_LANES) for i, source in enumerate(skipping)}
    top = max(rails.values(), default=-8) + 8 + MARGIN
    width = LEFT + BOX_WIDTH + RIGHT
    lefts = [MARGIN + (width + GAP) * stage for stage in range(plan.num_stages)]
    columns, routes = [], []
    for left, own in zip(lefts, boxes, strict=True):
        place = {"x": left + LEFT, "width": BOX_WIDTH, "height": BOX_HEIGHT}
        placed = [
            {**box._asdict(), **place, "y": _middle(top, row) - BOX_HEIGHT // 2}
            for row, box in enumerate(own)
        ]
        height = HEAD + len(own) * PITCH
        columns.append({"x": left, "width": width, "height": height, "boxes": placed})
    for (stage, row), cuts in sent.items():
        x, y = lefts[stage] + width, _middle(top, row)
        lines = []
        for target in _targets(cuts):
            rail = rails[stage, row] if target > stage + 1 else None
            lines.append(f"M{x - RIGHT} {y}{_route(x, y, lefts[target], top + HEAD // 2, rail)}")
        size = format_bytes(sum(cut.bytes + cut.mask_bytes for cut in cuts))
        hover = _lines([_told(cut) for cut in cuts])
        label = {"x": x + 6, "y": y, "label": size}
        routes.append({"stage": stage, "hover": hover, "paths": lines, **label})
    return {
        "text": f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}, "
        f"{count(len(plan.cuts), 'tensor')} sent between stages",
        "width": lefts[-1] + width + MARGIN,
        "height": top + HEAD + max(map(len, boxes)) * PITCH + MARGIN,
        "top": top,
        "columns": columns,
        "routes": routes,
        "label_width": LABEL_WIDTH,
        "label_height": LABEL_HEIGHT,
    }


def _boxes(plan: PlanData) -> tuple[list[list[Box]], dict[int, int]]:
    """The boxes of each stage, and the row of each operation."""
    columns: list[list[Box]] = []
    rows: dict[int, int] = {}
    for stage in range(plan.num_stages):
        nodes = [i for i, place in enumerate(plan.assignment) if place == stage]
        most = -(-len(nodes) // MOST_BOXES)
        columns.append([])
        for start in range(0, len(nodes), most):
            run = nodes[start : start + most]
            rows.update(dict.fromkeys(run, len(columns[-1])))
            names = [plan.node_names[i] for i in run]
            title = shorten(names[0], TITLE_CHARACTERS - 2) + (" …" if len(run) > 1 else "")
            note = f"{len(run)} operations" if len(run) > 1 else f"operation {run[0]}"
            columns[-1].append(Box(title, note, _lines(names)))
    return columns, rows


def _sent_from(plan: PlanData, rows: dict[int, int]) -> dict[tuple[int, int], list[CutEdge]]:
    """The tensors that leave a box for other stages, by its stage and row."""
    sent: dict[tuple[int, int], list[CutEdge]] = defaultdict(list)
    nodes = {name: i for i, name in enumerate(plan.node_names)}
    for tensor in plan.cuts:
        # Tensors are named after their operation, with [0], [1] behind it if it makes several.
        own = [i for i, stage in enumerate(plan.assignment) if stage == tensor.source]
        named = [nodes.get(name) for name in (tensor.tensor, tensor.tensor.rpartition("[")[0])]
        producer = next((i for i in named if i in own), own[-1])
        sent[tensor.source, rows[producer]].append(tensor)
    return sent


def _targets(cuts: Sequence[CutEdge]) -> list[int]:
    return sorted({target for cut in cuts for target in cut.targets})


def _middle(top: int, row: int) -> int:
    return top + HEAD + row * PITCH + BOX_HEIGHT // 2


def _route(x: int, y: int, goal: int, end: int, rail: int | None) -> str:
    """A line between columns, from behind a label to the goal; over those between on a rail."""
    turn, middle = x + LABEL_WIDTH + 10, (x + LABEL_WIDTH + 10 + goal) // 2
    if rail is None:
        return f"H{turn}C{middle} {y} {middle} {end} {goal} {end}"
    up, down = turn + 30, goal - 30
    return (
        f"H{turn}C{up} {y} {turn} {rail} {up} {rail}H{down}C{goal} {rail} {down} {end} {goal} {end}"
    )


def _told(tensor: CutEdge) -> str:
    mask = f" + mask of {format_bytes(tensor.mask_bytes)}" if tensor.mask_bytes else ""
    stages = ", ".join(map(str, tensor.targets))
    size = f"{format_bytes(tensor.bytes)} of {tensor.dtype}{mask}"
    return f"{tensor.tensor}: stage {tensor.source} to {stages}, {size}"


def _lines(texts: Sequence[str]) -> str:
    """What is shown when one points at something."""
    more = len(texts) - MOST_LINES
    return "\n".join([*texts[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])])


def shorten(text: str, most: int) -> str:
    """Shortens a name in its middle, for names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
