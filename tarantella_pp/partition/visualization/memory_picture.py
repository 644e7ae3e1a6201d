"""Memory of each stage: its parts on each other, and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan, StagePlan
from tarantella_pp.partition.plan.plan_config import common_limit
from tarantella_pp.partition.visualization.canvas.labels import percent
from tarantella_pp.partition.visualization.canvas.markup import (
    Markup,
    join,
    tag,
)
from tarantella_pp.partition.visualization.canvas.palette import PARTS
from tarantella_pp.partition.visualization.canvas.picture import Picture

LEFT, TOP, PLOT, COLUMN, BAR = 68, 30, 240, 72, 46
LEGEND_COLUMN = 128


def parts(stage: StagePlan) -> dict[str, int]:
    """Returns the bytes of each part of a stage's memory, from the bottom."""
    return {
        "weights": stage.parameter_bytes + stage.constant_bytes,
        "gradients": stage.gradient_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.in_flight * stage.activation_bytes,
        "recomputed": stage.recomputed_bytes,
        "working": stage.working_bytes,
        "buffers": stage.buffer_bytes + stage.reduction_bytes,
    }


def axis(plan: Plan) -> tuple[float, float]:
    """Returns the upper end of the axis and the step of its ticks, in bytes.

    A limit far above the stages would flatten them, so it is left off the axis then.
    """
    most = float(max(stage.memory_bytes for stage in plan.stages)) or 1.0
    top = max(most, *plan.limits) if plan.limits and limit_fits(plan) else most
    unit = 1024.0 ** min(4, math.floor(math.log(max(top, 1), 1024)))
    rough = top / unit / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough) * unit
    return step * math.ceil(top / step), step


def limit_fits(plan: Plan) -> bool:
    """Returns whether the limit can be drawn in the scale of the stages."""
    most = max(stage.memory_bytes for stage in plan.stages)
    return plan.limits is not None and max(plan.limits) <= 4 * most


def limit_label(plan: Plan) -> str:
    """Returns what to call the limit, empty without one."""
    if plan.limits is None:
        return ""
    limit = common_limit(plan.limits)
    text = "limits" if limit is None else f"limit {format_bytes(limit)}"
    return text if limit_fits(plan) else f"{text}, far above"


def memory_picture(plan: Plan) -> Picture:
    """Draws the memory of each stage."""
    top, step = axis(plan)
    width = max(LEFT + COLUMN * plan.num_stages + 8, 2 * LEGEND_COLUMN)
    pieces = []
    for i in range(round(top / step) + 1):
        y = TOP + PLOT * (1 - i * step / top)
        pieces.append(tag("path", class_="grid", d=f"M{LEFT} {y:.1f}H{width - 4}"))
        label = format_bytes(i * step) if i else "0"
        pieces.append(tag("text", label, class_="muted right", x=LEFT - 6, y=y + 4))
    pieces += [_column(plan, i, top) for i in range(plan.num_stages)]
    if plan.limits is not None:
        pieces.append(_limit(plan, plan.limits, top, width))
    base = TOP + PLOT + (62 if plan.memory_limit is not None else 48)
    shown = [part for part in PARTS if any(parts(stage)[part] for stage in plan.stages)]
    for i, part in enumerate(shown):
        x, y = 8 + LEGEND_COLUMN * (i % 2), base + 20 * (i // 2)
        pieces.append(tag("rect", class_=f"part-{part}", x=x, y=y, width=12, height=12, rx=2))
        pieces.append(tag("text", part, x=x + 18, y=y + 10))
    largest = max(stage.memory_bytes for stage in plan.stages)
    text = f"Memory of each stage, the largest {format_bytes(largest)}"
    return Picture(width, base + 20 * -(-len(shown) // 2), join(pieces), text)


def _column(plan: Plan, index: int, top: float) -> Markup:
    """One stage: its bar, and figures below it, where no line of a limit crosses them."""
    stage = plan.stages[index]
    x = LEFT + COLUMN * index + (COLUMN - BAR) / 2
    level, pieces = 0, []
    for part, size in parts(stage).items():
        if not size:
            continue
        height = PLOT * size / top
        y = TOP + PLOT * (1 - (level + size) / top)
        shapes = [tag("rect", class_=f"part-{part}", x=x, y=y, width=BAR, height=height)]
        share = f"{format_bytes(size)} ({percent(size, stage.memory_bytes)})"
        what = part
        if part == "activations":
            what = f"{stage.in_flight} x {format_bytes(stage.activation_bytes)} of activations"
            shapes.append(_slices(x, y, height, stage.in_flight))
        pieces.append(tag("g", tag("title", f"Stage {index}: {what}, {share}"), *shapes))
        level += size
    middle, below = x + BAR / 2, TOP + PLOT
    total = format_bytes(stage.memory_bytes)
    pieces.append(tag("text", f"Stage {index}", class_="muted middle", x=middle, y=below + 16))
    pieces.append(tag("text", total, class_="middle", x=middle, y=below + 31))
    if plan.limits is not None:
        over = stage.memory_bytes > plan.limits[index]
        share = percent(stage.memory_bytes, plan.limits[index])
        name = "over middle" if over else "muted middle"
        pieces.append(tag("text", share, class_=name, x=middle, y=below + 46))
    return tag("g", *pieces)


def _slices(x: float, y: float, height: float, in_flight: int) -> Markup:
    """Lines between the micro-batches in flight, where there is room for them."""
    if in_flight * 4 > height:
        return Markup()
    steps = [y + height * i / in_flight for i in range(1, in_flight)]
    lines = "".join(f"M{x:.1f} {at:.1f}h{BAR}" for at in steps)
    return tag("path", class_="slice", d=lines) if lines else Markup()


def _limit(plan: Plan, limits: Sequence[int], top: float, width: float) -> Markup:
    """A line across all stages, or one for each where limits differ."""
    fits = limit_fits(plan)
    heights = [TOP + PLOT * (1 - limit / top) if fits else TOP - 8 for limit in limits]
    path = f"M{LEFT} {heights[0]:.1f}H{width - 4:.1f}"
    if common_limit(limits) is None:
        columns = [LEFT + COLUMN * i for i in range(len(limits))]
        pairs = zip(columns, heights, strict=True)
        path = "".join(f"M{x + 4} {y:.1f}h{COLUMN - 8}" for x, y in pairs)
    return join(
        [
            tag("path", class_="limit", d=path),
            tag("text", limit_label(plan), class_="halo", x=LEFT + 4, y=heights[0] - 6),
        ]
    )
