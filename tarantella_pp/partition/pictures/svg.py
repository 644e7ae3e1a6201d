"""Pictures as SVG files."""

from __future__ import annotations

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.pictures.bars import StepBars
from tarantella_pp.partition.pictures.graph_picture import graph_picture
from tarantella_pp.partition.pictures.memory_picture import memory_picture
from tarantella_pp.partition.pictures.picture import Picture, below_each_other
from tarantella_pp.partition.pictures.timeline_picture import timeline_picture
from tarantella_pp.partition.plan import Plan


def render_svg(
    plan: Plan,
    kind: str = "sheet",
    *,
    graph: LayerGraph | None = None,
    timeline: StepBars | None = None,
) -> str:
    """Draws a plan as an SVG file; it brings its colours, light and dark.

    Args:
        plan: The plan.
        kind: `"timeline"`, `"memory"`, `"graph"`, or `"sheet"` for the first two in one.
        graph: The model's layer graph, for `"graph"`. Default: operations and cuts only.
        timeline: The step, for `"timeline"` and `"sheet"`.

    Returns:
        The file's text.

    Raises:
        ConfigurationError: There is no such kind, or the timeline is missing or too long.
        PlanError: The graph is one of another model.
    """
    return _picture(plan, kind, graph, timeline).alone()


def needs(kind: str, timeline: StepBars | None) -> StepBars:
    """Returns the step that a picture shows.

    Args:
        kind: The picture's kind.
        timeline: The step.

    Raises:
        ConfigurationError: It is missing.
    """
    if timeline is None:
        raise ConfigurationError(
            f"A picture of kind {kind!r} needs the computations of a step, as "
            "`tarantella_pp.pictures.simulated_step(plan)` gives them. Received: timeline=None"
        )
    return timeline


def _picture(plan: Plan, kind: str, graph: LayerGraph | None, timeline: StepBars | None) -> Picture:
    if kind == "graph":
        return graph_picture(plan, graph)
    if kind == "memory":
        return memory_picture(plan)
    if kind == "timeline":
        return timeline_picture(needs(kind, timeline))
    if kind == "sheet":
        return below_each_other([timeline_picture(needs(kind, timeline)), memory_picture(plan)])
    raise ConfigurationError(
        f"Expected 'timeline', 'memory', 'graph' or 'sheet'. Received: kind={kind!r}"
    )
