"""Pictures as SVG files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.visualization.canvas.labels import count, percent
from tarantella_pp.partition.visualization.canvas.markup import join, tag
from tarantella_pp.partition.visualization.canvas.picture import Picture, below_each_other
from tarantella_pp.partition.visualization.graph_drawing.drawing import graph_picture
from tarantella_pp.partition.visualization.memory_picture import memory_picture
from tarantella_pp.partition.visualization.step_rows import StepBars
from tarantella_pp.partition.visualization.timeline_picture import timeline_picture

CHARACTER = 7.3
"""Width of a character in pixels."""
GRAPH_LEGEND = (
    "Coloured lines are tensors sent between stages, with the bytes of one micro-batch; grey ones "
    "stay within a stage. A box with a second one behind it is several operations."
)


def render_svg(
    plan: Plan,
    kind: str = "sheet",
    *,
    graph: LayerGraph | None = None,
    timeline: StepBars | None = None,
) -> str:
    """Draws a plan as an SVG file; it brings its colours, light and dark."""
    pictures = _pictures(plan, kind, graph, timeline)
    return below_each_other([_heading(plan), *pictures]).alone()


def needs(kind: str, timeline: StepBars | None) -> StepBars:
    """Returns the step that a picture shows."""
    if timeline is None:
        raise ConfigurationError(
            f"A picture of kind {kind!r} needs the computations of a step, as "
            "`simulated_step` of `tarantella_pp.partition.visualization.step_rows` gives them. "
            "Received: timeline=None"
        )
    return timeline


def _pictures(
    plan: Plan, kind: str, graph: LayerGraph | None, timeline: StepBars | None
) -> Iterator[Picture]:
    if kind not in ("timeline", "memory", "graph", "sheet"):
        raise ConfigurationError(
            f"Expected 'timeline', 'memory', 'graph' or 'sheet'. Received: kind={kind!r}"
        )
    if kind in ("timeline", "sheet"):
        yield timeline_picture(needs(kind, timeline))
    if kind in ("memory", "sheet"):
        yield memory_picture(plan)
    if kind in ("graph", "sheet"):
        yield graph_picture(plan, graph)
        yield _lines([GRAPH_LEGEND])


def _heading(plan: Plan) -> Picture:
    """The name of the plan, and the figures that one looks for first."""
    largest = max(stage.memory_bytes for stage in plan.stages)
    micro_batches = count(plan.num_micro_batches, "micro-batch", "micro-batches")
    figures = [
        f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}",
        f"largest stage {format_bytes(largest)}",
        f"{plan.schedule}, {micro_batches} of {count(plan.micro_batch_size, 'sample')}",
        *([f"bubble {percent(plan.bubble)}"] if plan.bubble is not None else []),
    ]
    return _lines([f"Plan of '{plan.model}'", " · ".join(figures)])


def _lines(lines: Sequence[str]) -> Picture:
    """Lines of text, the first of several in bold."""
    bold = len(lines) > 1
    shapes = [
        tag("text", line, class_="strong" if bold and not i else "muted", x=8, y=18 + 20 * i)
        for i, line in enumerate(lines)
    ]
    width = 16 + CHARACTER * max(map(len, lines))
    return Picture(width, 8 + 20 * len(lines), join(shapes), lines[0])
