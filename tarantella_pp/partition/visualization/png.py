"""Timeline, memory and layer graph as PNG files; with matplotlib, which is optional."""

from __future__ import annotations

import os
import warnings
from typing import Any

from tarantella_pp.dependencies import needed_for
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_config import common_limit
from tarantella_pp.partition.visualization.canvas.labels import percent
from tarantella_pp.partition.visualization.canvas.palette import (
    KIND_NAMES,
    KINDS,
    LIGHT,
    PARTS,
)
from tarantella_pp.partition.visualization.graph_drawing.layout import lay_out
from tarantella_pp.partition.visualization.graph_drawing.outline import outline
from tarantella_pp.partition.visualization.graph_drawing.png_graph import PIXELS, draw_graph
from tarantella_pp.partition.visualization.memory_picture import (
    axis,
    limit_fits,
    limit_label,
    parts,
)
from tarantella_pp.partition.visualization.step_rows import StepBars
from tarantella_pp.partition.visualization.svg import needs
from tarantella_pp.partition.visualization.timeline_picture import ticks


def save_png(
    path: str | os.PathLike[str],
    plan: Plan,
    kind: str = "sheet",
    *,
    graph: LayerGraph | None = None,
    timeline: StepBars | None = None,
) -> None:
    """Draws a plan's timeline, its memory, its layer graph, or all of them, into a PNG file."""
    kinds = {"sheet": ["timeline", "memory", "graph"]}.get(kind, [kind])
    if not set(kinds) <= {"timeline", "memory", "graph"}:
        raise ConfigurationError(
            f"Expected 'timeline', 'memory', 'graph' or 'sheet'. Received: kind={kind!r}"
        )
    step = needs(kind, timeline) if "timeline" in kinds else None
    shown = outline(plan, graph)
    layout = lay_out(shown)
    wanted = layout.width / PIXELS if "graph" in kinds else 0.9 * plan.num_stages
    width = min(40.0, max(11.0, wanted))
    scale = min(1.0, 40.0 * PIXELS / layout.width, 40.0 * PIXELS / layout.height)
    tall = {"timeline": 1.0, "memory": 4.0, "graph": 0.2 + scale * layout.height / PIXELS}
    if step is not None:
        tall["timeline"] += 0.32 * len(step.rank_names)
    heights = [tall[one] for one in kinds]
    figure = _figure(width, min(60.0, 0.6 + sum(heights)))
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for one, place in zip(kinds, axes, strict=True):
        if step is not None and one == "timeline":
            _draw_timeline(place, step)
        elif one == "graph":
            draw_graph(place, plan, shown, layout, scale)
        else:
            _draw_memory(place, plan)
    figure.suptitle(f"Plan of '{plan.model}'", parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of exotic names
        figure.savefig(path, format="png", dpi=150)


def _figure(width: float, height: float) -> Any:
    """Returns a figure in inches that leaves the state of `pyplot` alone."""
    with needed_for("A PNG file, unlike an SVG file,"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=LIGHT.card)
    FigureCanvasAgg(figure)
    return figure


def _draw_timeline(axes: Any, step: StepBars) -> None:
    ranks = range(len(step.rank_names))
    waiting = {"color": LIGHT.page, "edgecolor": LIGHT.idle, "hatch": "////", "linewidth": 0}
    axes.barh(ranks, step.computed, height=0.8, label=f"bubble {percent(step.bubble)}", **waiting)
    for kind in step.kinds:
        label: str | None = f"{kind} {KIND_NAMES[kind]}"
        for rank in ranks:
            bars = [b for b in step.of_rank(rank) if b.kind == kind]
            spans = [(bar.start, bar.end - bar.start) for bar in bars]
            look = {"facecolor": KINDS[kind], "edgecolor": LIGHT.card, "linewidth": 0.4}
            place = (rank + 0.4, 0.1) if kind == "R" else (rank - 0.4, 0.8)
            axes.broken_barh(spans, place, label=label if spans else None, **look)
            label = None if spans else label
    names = [f"{n}\nidle {percent(i)}" for n, i in zip(step.rank_names, step.idle, strict=True)]
    axes.set_yticks(ranks, names, fontsize=7, parse_math=False)
    axes.invert_yaxis()
    marks = ticks(step)
    axes.set_xticks([at for at, _ in marks], [text for _, text in marks], fontsize=8)
    axes.set_xlim(0, step.length or 1)
    _finish(axes, f"Timeline, {step.name}")


def _draw_memory(axes: Any, plan: Plan) -> None:
    stages = range(plan.num_stages)
    sizes = [parts(stage) for stage in plan.stages]
    level = [0.0] * plan.num_stages
    for part, colour in PARTS.items():
        own = [size[part] for size in sizes]
        if not any(own):
            continue
        axes.bar(stages, own, 0.65, bottom=level, label=part, color=colour, edgecolor=LIGHT.card)
        level = [below + size for below, size in zip(level, own, strict=True)]
    top, step = axis(plan)
    if plan.limits is not None:
        line = {"color": LIGHT.warning, "linestyle": "--", "label": limit_label(plan)}
        if not limit_fits(plan):
            axes.plot([], [], **line)
        elif (limit := common_limit(plan.limits)) is not None:
            axes.axhline(limit, **line)
        else:
            axes.hlines(plan.limits, [i - 0.45 for i in stages], [i + 0.45 for i in stages], **line)
    totals = [f"Stage {i}\n{format_bytes(plan.stages[i].memory_bytes)}" for i in stages]
    axes.set_xticks(stages, totals, fontsize=8)
    levels = [step * i for i in range(round(top / step) + 1)]
    axes.set_yticks(levels, [format_bytes(value) for value in levels], fontsize=8)
    axes.set_ylim(0, top)
    _finish(axes, "Memory")


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
