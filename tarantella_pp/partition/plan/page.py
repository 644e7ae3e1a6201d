"""The page of a plan: one HTML file, without scripts, that loads nothing.

`page.html.j2` says how it looks. This file computes the figures, the memory of the stages and the
timeline; `page_graph.py` places the layer graph. Sizes are pixels.
"""

from __future__ import annotations

import functools
import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import markupsafe

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import count, format_bytes, format_flops, format_seconds
from tarantella_pp.partition.plan.page_graph import graph_drawing
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_config import common_limit
from tarantella_pp.partition.plan.plan_parts import StagePlan
from tarantella_pp.partition.plan.plan_simulation import planned_step
from tarantella_pp.partition.plan.report import choice_lines
from tarantella_pp.schedule import Compute
from tarantella_pp.simulation.pipelines import PipelineStep
from tarantella_pp.simulation.step_timeline import Event, idle_fraction

MOST_ROWS, MOST_REPLICAS = 5000, 64
"""Most rows of tables; who needs more reads the plan itself."""
MOST_BARS, MOST_DETAILS = 100_000, 4000
"""Bars of a timeline; with more than the second they have no texts, so the file stays small."""
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


def drawn_step(plan: Plan) -> PipelineStep | None:
    """Plays the step that the page shows; `None` where the schedule cannot be played."""
    try:
        return planned_step(plan)
    except ScheduleError:
        return None


def render_html(
    plan: Plan, graph: LayerGraph | None = None, step: PipelineStep | None = None
) -> str:
    """Makes the page: figures, stages, memory, timeline, layer graph and cuts."""
    owners = plan.ranks or range(plan.num_stages)
    ranks = [[s for s, own in enumerate(owners) if own == rank] for rank in range(plan.num_ranks)]
    return _template().render(
        plan=plan,
        graph=graph,
        step=step,
        choice=" ".join(choice_lines(plan)),
        tiles=_tiles(plan, step),
        stages=_stage_table(plan),
        memory=_memory(plan),
        timeline=step and _timeline(plan, step),
        drawing=graph_drawing(plan, graph),
        stages_of_ranks=ranks,
        most={"rows": MOST_ROWS, "replicas": MOST_REPLICAS},
    )


def as_frame(page: str) -> str:
    """Returns the element that shows a page inside of another one, as a notebook is."""
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
        "percent": _percent,
        "seconds": format_seconds,
    }
    return environment.get_template("page.html.j2")


def _shown(value: Any) -> Any:
    """Writes a value of the template: coordinates with at most one decimal, safe text."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(part: float, whole: float = 1.0) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def _tiles(plan: Plan, step: PipelineStep | None) -> list[dict[str, Any]]:
    """The figures that one looks for first."""
    largest = max(stage.memory_bytes for stage in plan.stages)
    value, note, over = format_bytes(largest), "no limit", False
    if plan.limits is not None:
        # Of unequal devices, the one that is fullest.
        sizes = [stage.memory_bytes for stage in plan.stages]
        pairs = zip(sizes, plan.limits, strict=True)
        size, limit = max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))
        value, over = format_bytes(size), size > limit
        note = f"{_percent(size, limit)} of {format_bytes(limit)}"
    bubble = plan.bubble if step is None else step.bubble_fraction
    parts = count(plan.num_micro_batches, "micro-batch")
    ranks = (plan.num_ranks if step is None else step.num_ranks) * plan.num_replicas
    narrow = "" if plan.wire_dtype is None else f", as {plan.wire_dtype}"
    tiles = {
        "Largest stage": (value, note),
        f"Balanced by {plan.balance}": _verdict(plan),
        "Bubble": ("-", "not simulated") if bubble is None else (_percent(bubble), "simulated"),
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


def _verdict(plan: Plan) -> tuple[str, str]:
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


def _memory_parts(stage: StagePlan) -> dict[str, int]:
    """The bytes of each part of a stage's memory, from the bottom."""
    return {
        "weights": stage.parameter_bytes + stage.constant_bytes,
        "gradients": stage.gradient_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.in_flight * stage.activation_bytes,
        "recomputed": stage.recomputed_bytes,
        "working": stage.working_bytes,
        "buffers": stage.buffer_bytes + stage.reduction_bytes,
    }


def _stage_table(plan: Plan) -> dict[str, Any]:
    """The table of stages, without its first two cells, which have markup."""
    heads = ["Stage", "Operations", "Number", "Weights", "Gradients", "Optimizer"]
    heads += ["Activations", "Working", "Buffers", "Memory", "FLOPs", "Sends"]
    if plan.limits is not None:
        heads.insert(10, "Of limit")
    work = sum(stage.flops for stage in plan.stages)
    rows, sums = [], dict.fromkeys(_memory_parts(plan.stages[0]), 0)
    for i, stage in enumerate(plan.stages):
        sizes = _memory_parts(stage)
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
            texts.append(_percent(stage.memory_bytes, plan.limits[i]))
        texts += [f"{_percent(stage.flops, work)} · {format_flops(stage.flops)}", _sends(plan, i)]
        rows.append([{"text": text, "over": over and at == 8} for at, text in enumerate(texts)])
    sums["activations"] += sums.pop("recomputed")
    memory = sum(stage.memory_bytes for stage in plan.stages)
    totals = ["All", "", f"{len(plan.node_names):,}", *map(format_bytes, sums.values())]
    totals += [format_bytes(memory), *([] if plan.limits is None else [""])]
    return {"heads": heads, "rows": rows, "totals": [*totals, format_flops(work), _sends(plan)]}


def _sends(plan: Plan, stage: int | None = None) -> str:
    """What a stage, or all of them, send forward for one micro-batch."""
    sent = plan.sent_bytes(stage)
    return format_bytes(sent) if sent else "-"


def _memory(plan: Plan) -> dict[str, Any]:
    """The memory of each stage: its parts on each other, and the limit."""
    left, top, plot, pitch, bar, legend_pitch = 68, 30, 240, 72, 46, 128
    end, tick = _memory_axis(plan)
    limits = plan.limits or ()
    parts = [_memory_parts(stage) for stage in plan.stages]
    columns = []
    for i, (stage, sizes) in enumerate(zip(plan.stages, parts, strict=True)):
        x, level, shown = left + pitch * i + (pitch - bar) / 2, 0, []
        for part, size in sizes.items():
            if not size:
                continue
            level += size
            height, y = plot * size / end, top + plot * (1 - level / end)
            what, slices = part, ""
            if part == "activations":
                what = f"{stage.in_flight} x {format_bytes(stage.activation_bytes)} of activations"
                if stage.in_flight * 4 <= height:  # lines need room between them
                    steps = [y + height * n / stage.in_flight for n in range(1, stage.in_flight)]
                    slices = "".join(f"M{x:.1f} {at:.1f}h{bar}" for at in steps)
            share = f"{format_bytes(size)} ({_percent(size, stage.memory_bytes)})"
            title = f"Stage {i}: {what}, {share}"
            bars = {"name": part, "title": title, "y": y, "height": height, "slices": slices}
            shown.append(bars)
        column = {"x": x, "parts": shown, "total": format_bytes(stage.memory_bytes), "share": ""}
        if limits:
            column["share"] = _percent(stage.memory_bytes, limits[i])
            column["over"] = stage.memory_bytes > limits[i]
        columns.append(column)
    names = [name for name in parts[0] if any(sizes[name] for sizes in parts)]
    base = top + plot + (62 if limits else 48)
    width = max(left + pitch * plan.num_stages + 8, 2 * legend_pitch)
    fits = _limit_fits(plan)
    heights = [top + plot * (1 - limit / end) if fits else top - 8 for limit in limits]
    line = None
    if limits:
        path = f"M{left} {heights[0]:.1f}H{width - 4:.1f}"
        if (common := common_limit(limits)) is None:
            xs = [left + pitch * i for i in range(len(limits))]
            pairs = zip(xs, heights, strict=True)
            path = "".join(f"M{x + 4} {y:.1f}h{pitch - 8}" for x, y in pairs)
        label = "limits" if common is None else f"limit {format_bytes(common)}"
        line = {"path": path, "y": heights[0], "label": label + ("" if fits else ", far above")}
    return {
        "width": width,
        "height": base + 20 * -(-len(names) // 2),
        "text": "Memory of each stage, the largest "
        + format_bytes(max(stage.memory_bytes for stage in plan.stages)),
        "left": left,
        "bar": bar,
        "base": top + plot,
        "columns": columns,
        "limit": line,
        "ticks": [
            {"y": top + plot * (1 - i * tick / end), "label": format_bytes(i * tick) if i else "0"}
            for i in range(round(end / tick) + 1)
        ],
        "legend": [
            {"name": name, "x": 8 + legend_pitch * (i % 2), "y": base + 20 * (i // 2)}
            for i, name in enumerate(names)
        ],
    }


def _memory_axis(plan: Plan) -> tuple[float, float]:
    """The upper end of the axis and the step of its ticks, in bytes."""
    top = float(max(stage.memory_bytes for stage in plan.stages)) or 1.0
    if plan.limits is not None and _limit_fits(plan):
        top = max(top, *plan.limits)
    unit = 1024.0 ** min(4, math.floor(math.log(max(top, 1), 1024)))
    step = _nice(top / unit / 4, (1, 2, 2.5, 5, 10)) * unit
    return step * math.ceil(top / step), step


def _limit_fits(plan: Plan) -> bool:
    """Whether the limit can be drawn: one far above the stages would flatten them."""
    most = max(stage.memory_bytes for stage in plan.stages)
    return plan.limits is not None and max(plan.limits) <= 4 * most


def _nice(rough: float, factors: Sequence[float]) -> float:
    """The next number above that people count in."""
    size = 10.0 ** math.floor(math.log10(rough))
    return next(factor * size for factor in factors if factor * size >= rough)


def _timeline(plan: Plan, step: PipelineStep) -> dict[str, Any]:
    """What each rank computes when, and where it waits."""
    note = "Times follow the FLOPs of the stages; each gradient takes as long as the forward pass"
    note += ", which stages that recompute repeat" if plan.recompute else ""
    note += f", and messages take {'no time' if plan.machine is None else 'what links allow'}."
    found: dict[str, Any] = {"in_seconds": plan.machine is not None, "note": note, "ranks": []}
    played = () if step.timeline is None else step.timeline.events
    events = [[e for e in own if isinstance(e.action, Compute)] for own in played]
    if not 0 < sum(map(len, events)) <= MOST_BARS:
        return found
    for rank, sums in enumerate(step.reductions):
        events[rank] += sums
    stages = [[s for s, own in enumerate(step.placement) if own == r] for r in range(len(events))]
    names = [
        f"rank {rank} (stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))})"
        for rank, own in enumerate(stages)
    ]
    top, row, pitch, right = 34, 26, 32, 100
    left = 16 + 7.3 * max(map(len, names))
    # Wide enough for the bars of the busiest rank, and at least as wide as the page.
    plot = max(1196 - left - right, min(9.0 * max(map(len, events)), 2400))
    scale = plot / (step.step_seconds or 1.0)
    bottom = top + pitch * len(names)
    is_detailed = sum(map(len, events)) <= MOST_DETAILS
    for rank, own in enumerate(events):
        idle = idle_fraction([step.busy_seconds[rank]], step.pipeline_seconds)
        y = top + pitch * rank
        line: dict[str, Any] = {"name": names[rank], "y": y, "idle": _percent(idle)}
        bars = [_bar(event, left, y, row, scale) for event in own]
        if is_detailed:
            _add_texts(plan, step, bars, names_stages=len(stages[rank]) > 1)
        line["paths"] = {} if is_detailed else _outlines(bars)
        found["ranks"].append(line | {"bars": bars if is_detailed else []})
    legend, x = [], 8.0
    kinds = {_kind(event) for own in events for event in own}
    texts = {f"kind{kind}": f"{kind} {text}" for kind, text in KINDS.items() if kind in kinds}
    bubble = f"bubble {_percent(step.bubble_fraction)}"
    for name, text in {**texts, "idle": bubble}.items():
        legend.append({"class": name, "x": x, "text": text})
        x += 40 + 7.3 * len(text)
    return found | {
        "text": f"Timeline of {len(names)} ranks with schedule {step.schedule}, {bubble}",
        "width": left + plot + right, "height": bottom + 26, "left": left, "top": top, "row": row,
        "bottom": bottom, "end": left + step.step_seconds * scale,
        "computed": step.pipeline_seconds * scale, "legend": legend,
        "ticks": [{"x": left + at * scale, "label": label} for at, label in _ticks(plan, step)],
    }  # fmt: skip


def _ticks(plan: Plan, step: PipelineStep) -> Iterator[tuple[float, str]]:
    """Times of a step to mark, and what to call them."""
    length = step.step_seconds
    if plan.machine is None or not length:
        yield from ((length * i / 4, f"{25 * i} %") for i in range(5))
        return
    gap = _nice(length / 5, (1, 2, 5, 10))
    for i in range(int(length / gap) + 1):
        yield i * gap, format_seconds(i * gap) if i else "0"


def _kind(event: Event) -> str:
    return event.action.kind if isinstance(event.action, Compute) else "R"


def _bar(event: Event, left: float, y: float, row: float, scale: float) -> dict[str, Any]:
    """Where an event is drawn: a computation in the row of its rank, a reduction below it."""
    x, width = left + event.start * scale, (event.end - event.start) * scale
    below = {"y": y + row, "height": 5} if _kind(event) == "R" else {"y": y, "height": row}
    gap = 0.8 if width > 4 else 0.0
    place = {"x": x, "middle": x + width / 2, "width": width - gap}
    return {"event": event, "kind": _kind(event), "whole": width, **place, **below}


def _outlines(bars: Sequence[dict[str, Any]]) -> dict[str, str]:
    """One path for all bars of each kind."""
    paths = {bar["kind"]: "" for bar in bars}
    for bar in bars:
        width, height = _number(max(bar["whole"], 0.1)), bar["height"]
        paths[bar["kind"]] += f"M{_number(bar['x'])} {bar['y']}h{width}v{height}h-{width}z"
    return paths


def _add_texts(
    plan: Plan, step: PipelineStep, bars: Sequence[dict[str, Any]], *, names_stages: bool
) -> None:
    """Adds what stands in bars: labels where all of a kind fit, else numbers, else nothing."""
    length = step.step_seconds
    for bar in bars:
        event: Event = bar["event"]
        label = str(event.action)
        if isinstance(event.action, Compute) and not names_stages:
            label = f"{event.action.kind}{event.action.micro_batch}"
        when = f"{_percent(event.start, length)} to {_percent(event.end, length)} of the step"
        if plan.machine is not None:
            when = f"{format_seconds(event.start)} to {format_seconds(event.end)}"
        bar["title"] = f"{label}: {KINDS[bar['kind']]}, {when}"
        bar["forms"] = (label, label[len(label.rstrip("0123456789")) :], "")
    for kind in KINDS:
        own = [bar for bar in bars if bar["kind"] == kind]
        for form in range(3):
            if all(6.1 * len(bar["forms"][form]) + 3 <= bar["whole"] for bar in own) or form == 2:
                for bar in own:
                    bar["text"] = "" if kind == "R" else bar["forms"][form]
                break
