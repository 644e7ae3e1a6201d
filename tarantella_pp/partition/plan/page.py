"""The page of a plan: one HTML file, without scripts, that loads nothing.

`page.html.j2` says how it looks; this file computes the figures, and places what is drawn.
"""

from __future__ import annotations

import functools
import html
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jinja2
import markupsafe

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.graph.units import (
    count,
    format_bytes,
    format_flops,
    format_seconds,
    percent,
)
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.partition.plan.plan_simulation import planned_step
from tarantella_pp.partition.plan.report import step_lines
from tarantella_pp.schedule import Compute
from tarantella_pp.schedule.simulator import StepTimeline

# Most rows of tables; who needs more reads the plan itself.
MOST_ROWS, MOST_REPLICAS = 5000, 64
# Most computations that a timeline draws, and the width of its bars in pixels.
MOST_BARS, LEAST_WIDTH, MOST_WIDTH = 10_000, 900, 2400
KINDS = {
    "F": "forward",
    "R": "forward again",
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "backward (both gradients)",
    "A": "reduction over replicas",
}
# XML does not allow these, or they turn around the direction of the text behind them.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|[\u202a-\u202e\u2066-\u2069]"
)


def render_html(plan: PlanData) -> str:
    """Makes the page: figures, stages, memory, timeline, operations and cuts."""
    try:
        step = planned_step(plan)
    except ScheduleError:  # it cannot be played
        step = None
    owners = plan.ranks or range(plan.num_stages)
    ranks = [[s for s, own in enumerate(owners) if own == rank] for rank in range(plan.num_ranks)]
    return _template().render(
        plan=plan,
        step=step,
        seconds=" ".join(step_lines(plan)),
        memory=_memory(plan),
        timeline=step and _timeline(plan, step),
        kinds=KINDS,
        drawing=graph_drawing(plan),
        stages_of_ranks=ranks,
        most={"rows": MOST_ROWS, "replicas": MOST_REPLICAS},
    )


def as_frame(page: str) -> str:
    """Returns the element that shows a page inside of another one, as a notebook is."""
    # A frame of its own: a notebook's style sheets must not reach the page, nor its the notebook.
    style = "width:100%;height:800px;border:0"
    return f'<iframe sandbox="" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("tarantella_pp.partition.plan", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, finalize=_shown, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "bytes": format_bytes,
        "count": count,
        "flops": format_flops,
        "percent": percent,
        "seconds": format_seconds,
    }
    return environment.get_template("page.html.j2")


def _shown(value: Any) -> Any:
    """Writes a value of the template: coordinates with at most one decimal, safe text."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def _memory(plan: PlanData) -> dict[str, Any]:
    """The parts of each stage's memory, their sums, and the bytes at the end of the longest bar."""
    most = max(stage.memory_bytes for stage in plan.stages)
    # A limit far above the stages would flatten them.
    ends = [most, *(limit for limit in plan.limits or () if limit <= 4 * most)]
    parts = [
        {
            "weights": stage.parameter_bytes + stage.constant_bytes,
            "gradients": stage.gradient_bytes,
            "optimizer": stage.optimizer_bytes,
            "activations": stage.in_flight * stage.activation_bytes,
            "recomputed": stage.recomputed_bytes,
            "working": stage.working_bytes,
            "buffers": stage.buffer_bytes + stage.reduction_bytes,
        }
        for stage in plan.stages
    ]
    sums = {name: sum(sizes[name] for sizes in parts) for name in parts[0]}
    pairs = zip(plan.stages, plan.limits or (), strict=plan.limits is not None)
    fullest = max((stage.memory_bytes / limit for stage, limit in pairs), default=0.0)
    return {"most": most, "end": max(ends) or 1, "parts": parts, "sums": sums, "fullest": fullest}


def _timeline(plan: PlanData, step: StepTimeline) -> dict[str, Any]:
    """What each rank computes when, and where it waits; no ranks where that is too much."""
    events = [[e for e in own if isinstance(e.action, Compute)] for own in step.events]
    if not 0 < sum(map(len, events)) <= MOST_BARS:
        return {"ranks": []}
    for rank, sums in enumerate(step.reductions):
        events[rank] += sums
    length, kinds = step.step_seconds or 1.0, set()
    ranks: list[dict[str, Any]] = []
    scale = min(max(LEAST_WIDTH, 9.0 * max(map(len, events))), MOST_WIDTH) / length
    in_seconds = plan.machine is not None
    for rank, own in enumerate(events):
        stages = [stage for stage, owner in enumerate(step.placement) if owner == rank]
        bars: list[dict[str, Any]] = []
        for event in own:
            action, label, kind = event.action, str(event.action), "A"
            if isinstance(action, Compute):
                kind = action.kind
                label = label if len(stages) > 1 else f"{kind}{action.micro_batch}"
            times = [
                format_seconds(at) if in_seconds else percent(at, length)
                for at in (event.start, event.end)
            ]
            kinds.add(kind)
            width = (event.end - event.start) * scale
            fits = kind != "A" and 6.1 * len(label) + 3 <= width
            bars.append({
                "kind": kind, "x": event.start * scale, "width": width,
                "title": f"{label}: {KINDS[kind]}, {times[0]} to {times[1]}",
                "text": label if fits else "",
            })  # fmt: skip
        name = f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"
        ranks.append({"name": name, "idle": percent(step.idle_fraction(rank)), "bars": bars})
    ticks = [format_seconds(length * i / 4) if in_seconds else f"{25 * i} %" for i in range(5)]
    return {
        "ranks": ranks,
        "text": f"Timeline of {count(len(ranks), 'rank')} with schedule {step.name}",
        "left": 16 + 7.3 * max(len(rank["name"]) for rank in ranks),
        "length": length * scale,
        "computed": step.pipeline_seconds * scale,
        "ticks": ticks,
        "kinds": [kind for kind in KINDS if kind in kinds],
    }


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


# Operations stand below each other in the order in which they run. Nothing ever crosses a box:
#
#      rail ------------------------------+        tensors that skip stages run over the columns
#      |  stage 0          stage 1        |  stage 2
#      |  +-----+          +-----+        |  +-----+
#     -+--| box |--bytes-->|     |--bytes-+->|     |    those for the next stage run between columns
#         +-----+          +-----+           +-----+
def graph_drawing(plan: PlanData) -> dict[str, Any]:
    """Draws a column of operations for each stage, and what is sent between them."""
    boxes, rows = _boxes(plan)
    sent = _sent_from(plan, rows)
    skipping = [source for source, cuts in sent.items() if _targets(cuts)[-1] > source[0] + 1]
    rails = {source: MARGIN + LANE * (i % MOST_LANES) for i, source in enumerate(skipping)}
    top = max(rails.values(), default=-8) + 8 + MARGIN
    width = LEFT + BOX_WIDTH + RIGHT
    lefts = [MARGIN + (width + GAP) * stage for stage in range(plan.num_stages)]
    columns, routes = [], []
    for left, own in zip(lefts, boxes, strict=True):
        place = {"x": left + LEFT, "width": BOX_WIDTH, "height": BOX_HEIGHT}
        placed = [
            {**box, **place, "y": _middle(top, row) - BOX_HEIGHT // 2}
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


def _boxes(plan: PlanData) -> tuple[list[list[dict[str, str]]], dict[int, int]]:
    """The boxes of each stage, and the row of each operation."""
    columns: list[list[dict[str, str]]] = []
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
            columns[-1].append({"title": title, "note": note, "hover": _lines(names)})
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
    more = len(texts) - MOST_LINES
    return "\n".join([*texts[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])])


def shorten(text: str, most: int) -> str:
    """Shortens a name in its middle, for names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
