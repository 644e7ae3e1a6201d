"""The page of a plan: one HTML file, without scripts, that loads nothing.

`page.html.j2` says how it looks, this file computes figures, tables and the timeline, and
`page_graph.py` places operations and what is sent.
"""

from __future__ import annotations

import functools
import html
import re
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
from tarantella_pp.partition.plan.page_graph import graph_drawing
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import StagePlan
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
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "backward (both gradients)",
    "R": "reduction over replicas",
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


def _memory_parts(stage: StagePlan) -> dict[str, int]:
    return {
        "weights": stage.parameter_bytes + stage.constant_bytes,
        "gradients": stage.gradient_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.in_flight * stage.activation_bytes,
        "recomputed": stage.recomputed_bytes,
        "working": stage.working_bytes,
        "buffers": stage.buffer_bytes + stage.reduction_bytes,
    }


def _memory(plan: PlanData) -> dict[str, Any]:
    """The parts of each stage's memory, their sums, and the bytes at the end of the longest bar."""
    most = max(stage.memory_bytes for stage in plan.stages)
    # A limit far above the stages would flatten them.
    ends = [most, *(limit for limit in plan.limits or () if limit <= 4 * most)]
    parts = [_memory_parts(stage) for stage in plan.stages]
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
    length, longest = step.step_seconds or 1.0, 0
    ranks, kinds = [], set()
    scale = min(max(LEAST_WIDTH, 9.0 * max(map(len, events))), MOST_WIDTH) / length
    in_seconds = plan.machine is not None
    for rank, own in enumerate(events):
        stages = [stage for stage, owner in enumerate(step.placement) if owner == rank]
        bars: list[dict[str, Any]] = []
        for event in own:
            action, label, kind = event.action, str(event.action), "R"
            if isinstance(action, Compute):
                kind = action.kind
                label = label if len(stages) > 1 else f"{kind}{action.micro_batch}"
            times = [
                format_seconds(at) if in_seconds else percent(at, length)
                for at in (event.start, event.end)
            ]
            kinds.add(kind)
            width = (event.end - event.start) * scale
            fits = kind != "R" and 6.1 * len(label) + 3 <= width
            bars.append({
                "kind": kind, "x": event.start * scale, "width": width,
                "title": f"{label}: {KINDS[kind]}, {times[0]} to {times[1]}",
                "text": label if fits else "",
            })  # fmt: skip
        idle = step.idle_fraction(rank)
        name = f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"
        longest = max(longest, len(name))
        ranks.append({"name": name, "idle": percent(idle), "bars": bars})
    ticks = [format_seconds(length * i / 4) if in_seconds else f"{25 * i} %" for i in range(5)]
    return {
        "ranks": ranks,
        "text": f"Timeline of {count(len(ranks), 'rank')} with schedule {step.name}",
        "left": 16 + 7.3 * longest,
        "length": length * scale,
        "computed": step.pipeline_seconds * scale,
        "ticks": ticks,
        "kinds": [kind for kind in KINDS if kind in kinds],
    }
