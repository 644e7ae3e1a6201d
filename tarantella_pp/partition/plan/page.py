"""The page of a plan: one HTML file, without scripts, that loads nothing.

`page.html.j2` says how it looks, this file computes figures and tables, `page_pictures.py` the
memory of stages and the timeline, and `page_graph.py` places the layer graph.
"""

from __future__ import annotations

import functools
import html
import re
from typing import Any

import jinja2
import markupsafe

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import (
    count,
    format_bytes,
    format_flops,
    format_seconds,
    percent,
)
from tarantella_pp.partition.plan.page_graph import graph_drawing
from tarantella_pp.partition.plan.page_pictures import (
    coordinate,
    memory_parts,
    memory_picture,
    timeline_picture,
)
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_simulation import planned_step
from tarantella_pp.partition.plan.report import choice_lines
from tarantella_pp.simulation.pipelines import PipelineStep

# Most rows of tables; who needs more reads the plan itself.
MOST_ROWS, MOST_REPLICAS = 5000, 64
# XML does not allow these, or they turn around the direction of the text behind them.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|[\u202a-\u202e\u2066-\u2069]"
)


def render_html(plan: PlanData, graph: LayerGraph | None = None) -> str:
    """Makes the page: figures, stages, memory, timeline, layer graph and cuts."""
    try:
        step = planned_step(plan)
    except ScheduleError:  # it cannot be played
        step = None
    owners = plan.ranks or range(plan.num_stages)
    ranks = [[s for s, own in enumerate(owners) if own == rank] for rank in range(plan.num_ranks)]
    return _template().render(
        plan=plan,
        graph=graph,
        step=step,
        choice=" ".join(choice_lines(plan)),
        tiles=_tiles(plan, step),
        stages=_stage_table(plan),
        memory=memory_picture(plan),
        timeline=step and timeline_picture(plan, step),
        drawing=graph_drawing(plan, graph),
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
        return coordinate(value)
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def _tiles(plan: PlanData, step: PipelineStep | None) -> list[dict[str, Any]]:
    """The figures that one looks for first."""
    largest = max(stage.memory_bytes for stage in plan.stages)
    value, note, over = format_bytes(largest), "no limit", False
    if plan.limits is not None:
        # Of unequal devices, the one that is fullest.
        sizes = [stage.memory_bytes for stage in plan.stages]
        pairs = zip(sizes, plan.limits, strict=True)
        size, limit = max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))
        value, over = format_bytes(size), size > limit
        note = f"{percent(size, limit)} of {format_bytes(limit)}"
    bubble = plan.bubble if step is None else step.bubble_fraction
    parts = count(plan.num_micro_batches, "micro-batch")
    ranks = (plan.num_ranks if step is None else step.num_ranks) * plan.num_replicas
    narrow = "" if plan.wire_dtype is None else f", as {plan.wire_dtype}"
    tiles = {
        "Largest stage": (value, note),
        f"Balanced by {plan.balance}": _verdict(plan),
        "Bubble": ("-", "not simulated") if bubble is None else (percent(bubble), "simulated"),
        "Batch": (f"{plan.batch_size:,}", f"{parts} of {count(plan.micro_batch_size, 'sample')}"),
        "Ranks": (
            f"{ranks:,}",
            f"{count(plan.num_stages, 'stage')} × {count(plan.num_replicas, 'replica')}",
        ),
        "Sent forward": (
            format_bytes(plan.sent_bytes()),
            f"{count(len(plan.cuts), 'tensor')}, per micro-batch{narrow}",
        ),
    }
    return [
        {"name": name, "value": value, "note": note, "over": over and name == "Largest stage"}
        for name, (value, note) in tiles.items()
    ]


def _verdict(plan: PlanData) -> tuple[str, str]:
    """How good the plan is known to be."""
    proof = plan.certificate
    value, bound = (
        f"{format_flops(v)} per sample" if plan.balance == "flops" else format_bytes(v)
        for v in (proof.value, proof.lower_bound)
    )
    if proof.optimal:
        return "optimal", f"{value}, proven by {proof.method} in {format_seconds(proof.seconds)}"
    if proof.gap is None:
        return value, f"no lower bound ({proof.method})"
    return f"gap ≤ {100 * proof.gap:.2g} %", f"{value}, no plan is below {bound} ({proof.method})"


def _stage_table(plan: PlanData) -> dict[str, Any]:
    """The table of stages, without its first two cells, which have markup."""
    heads = ["Stage", "Operations", "Number", "Weights", "Gradients", "Optimizer"]
    heads += ["Activations", "Working", "Buffers", "Memory", "FLOPs", "Sends"]
    if plan.limits is not None:
        heads.insert(10, "Of limit")
    work = sum(stage.flops for stage in plan.stages)
    rows, sums = [], dict.fromkeys(memory_parts(plan.stages[0]), 0)
    for i, stage in enumerate(plan.stages):
        sizes = memory_parts(stage)
        sums = {part: sums[part] + size for part, size in sizes.items()}
        again = sizes.pop("recomputed")
        shown = {part: format_bytes(size) for part, size in sizes.items()}
        shown["activations"] = f"{stage.in_flight} × {format_bytes(stage.activation_bytes)}"
        if again:
            shown["activations"] += f" + {format_bytes(again)}"
        texts = [f"{stage.nodes:,}", *shown.values(), format_bytes(stage.memory_bytes)]
        over = False
        if plan.limits is not None:
            over = stage.memory_bytes > plan.limits[i]
            texts.append(percent(stage.memory_bytes, plan.limits[i]))
        texts += [f"{percent(stage.flops, work)} · {format_flops(stage.flops)}", _sends(plan, i)]
        rows.append([{"text": text, "over": over and at == 8} for at, text in enumerate(texts)])
    sums["activations"] += sums.pop("recomputed")
    memory = sum(stage.memory_bytes for stage in plan.stages)
    totals = ["All", "", f"{len(plan.node_names):,}", *map(format_bytes, sums.values())]
    totals += [format_bytes(memory), *([] if plan.limits is None else [""])]
    return {"heads": heads, "rows": rows, "totals": [*totals, format_flops(work), _sends(plan)]}


def _sends(plan: PlanData, stage: int | None = None) -> str:
    """What a stage, or all of them, send forward for one micro-batch."""
    sent = plan.sent_bytes(stage)
    return format_bytes(sent) if sent else "-"
