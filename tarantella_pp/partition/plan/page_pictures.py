"""The memory of stages, the timeline and boxes of operations on the page of a plan, in pixels."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tarantella_pp.partition.graph.layer_graph import Node
from tarantella_pp.partition.graph.units import (
    count,
    format_bytes,
    format_flops,
    format_seconds,
    percent,
)
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import StagePlan, common_limit
from tarantella_pp.schedule import Compute
from tarantella_pp.simulation.pipelines import PipelineStep
from tarantella_pp.simulation.simulator import Event, idle_fraction

# Bars of a timeline; with more than the second they have no texts, so the file stays small.
MOST_BARS, MOST_DETAILS = 100_000, 4000
# What fits in a box.
TITLE_CHARACTERS, NOTE_CHARACTERS = 23, 27
KINDS = {
    "F": "forward",
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "backward (both gradients)",
    "R": "reduction over replicas",
}


def memory_parts(stage: StagePlan) -> dict[str, int]:
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


def memory_picture(plan: PlanData) -> dict[str, Any]:
    """The memory of each stage: its parts on each other, and the limit."""
    left, top, plot, pitch, bar, legend_pitch = 68, 30, 240, 72, 46, 128
    end, tick = _memory_axis(plan)
    limits = plan.limits or ()
    parts = [memory_parts(stage) for stage in plan.stages]
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
            share = f"{format_bytes(size)} ({percent(size, stage.memory_bytes)})"
            title = f"Stage {i}: {what}, {share}"
            bars = {"name": part, "title": title, "y": y, "height": height, "slices": slices}
            shown.append(bars)
        column = {"x": x, "parts": shown, "total": format_bytes(stage.memory_bytes), "share": ""}
        if limits:
            column["share"] = percent(stage.memory_bytes, limits[i])
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


def _memory_axis(plan: PlanData) -> tuple[float, float]:
    """The upper end of the axis and the step of its ticks, in bytes."""
    top = float(max(stage.memory_bytes for stage in plan.stages)) or 1.0
    if plan.limits is not None and _limit_fits(plan):
        top = max(top, *plan.limits)
    unit = 1024.0 ** min(4, math.floor(math.log(max(top, 1), 1024)))
    step = _nice(top / unit / 4, (1, 2, 2.5, 5, 10)) * unit
    return step * math.ceil(top / step), step


def _limit_fits(plan: PlanData) -> bool:
    """Whether the limit can be drawn: one far above the stages would flatten them."""
    most = max(stage.memory_bytes for stage in plan.stages)
    return plan.limits is not None and max(plan.limits) <= 4 * most


def _nice(rough: float, factors: Sequence[float]) -> float:
    """The next number above that people count in."""
    size = 10.0 ** math.floor(math.log10(rough))
    return next(factor * size for factor in factors if factor * size >= rough)


def timeline_picture(plan: PlanData, step: PipelineStep) -> dict[str, Any]:
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
        line: dict[str, Any] = {"name": names[rank], "y": y, "idle": percent(idle)}
        bars = [_bar(event, left, y, row, scale) for event in own]
        if is_detailed:
            _add_texts(plan, step, bars, names_stages=len(stages[rank]) > 1)
        line["paths"] = {} if is_detailed else _outlines(bars)
        found["ranks"].append(line | {"bars": bars if is_detailed else []})
    legend, x = [], 8.0
    kinds = {_kind(event) for own in events for event in own}
    texts = {f"kind{kind}": f"{kind} {text}" for kind, text in KINDS.items() if kind in kinds}
    bubble = f"bubble {percent(step.bubble_fraction)}"
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


def _ticks(plan: PlanData, step: PipelineStep) -> Iterator[tuple[float, str]]:
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
        width, height = coordinate(max(bar["whole"], 0.1)), bar["height"]
        paths[bar["kind"]] += f"M{coordinate(bar['x'])} {bar['y']}h{width}v{height}h-{width}z"
    return paths


def _add_texts(
    plan: PlanData, step: PipelineStep, bars: Sequence[dict[str, Any]], *, names_stages: bool
) -> None:
    """Adds what stands in bars: labels where all of a kind fit, else numbers, else nothing."""
    length = step.step_seconds
    for bar in bars:
        event: Event = bar["event"]
        label = str(event.action)
        if isinstance(event.action, Compute) and not names_stages:
            label = f"{event.action.kind}{event.action.micro_batch}"
        when = f"{percent(event.start, length)} to {percent(event.end, length)} of the step"
        if plan.machine is not None:
            when = f"{format_seconds(event.start)} to {format_seconds(event.end)}"
        bar["title"] = f"{label}: {KINDS[bar['kind']]}, {when}"
        bar["forms"] = (label, label[len(label.rstrip("0123456789")) :], "")
    # All bars of a kind alike: a text here and none there would look like a difference.
    for kind in KINDS:
        own = [bar for bar in bars if bar["kind"] == kind]
        for form in range(3):
            if all(6.1 * len(bar["forms"][form]) + 3 <= bar["whole"] for bar in own) or form == 2:
                for bar in own:
                    bar["text"] = "" if kind == "R" else bar["forms"][form]
                break


def coordinate(value: float) -> str:
    """Writes a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class Box(NamedTuple):
    """An operation, a run of them, or the inputs or outputs of the model (`"end"`)."""

    title: str
    note: str
    hover: str
    role: str = "layer"


def layer_box(names: Sequence[str], run: range, nodes: Sequence[Node], index: int) -> Box:
    """The box of an operation, or of a run of them; nodes are known with the graph only."""
    size = sum(node.parameters + node.constants for node in nodes)
    sizes = [format_bytes(size)] if size else []
    weights = [f"weights {text}" for text in sizes]
    if len(run) == 1:
        name = names[run.start]
        text = shorten(name, TITLE_CHARACTERS)
        if not nodes:
            return Box(text, f"operation {index}", f"{name}\noperation {index}")
        kind = shorten(nodes[0].kind, NOTE_CHARACTERS - sum(3 + len(s) for s in sizes))
        work = [f"{format_flops(nodes[0].flops)} per sample"] if nodes[0].flops else []
        hover = "\n".join([name, nodes[0].kind, *weights, *work])
        return Box(text, " · ".join([kind, *sizes]), hover)
    # The kind of layer that does most of the arithmetic says what the run is.
    flops, kinds = Counter[str](), Counter(node.kind for node in nodes)
    for node in nodes:
        flops[node.kind] += int(node.flops)
    busiest = [f"{kinds[kind]} {kind}" for kind, _ in flops.most_common(1)]
    note = shorten(" · ".join([f"{len(run)} ops", *busiest]), NOTE_CHARACTERS)
    shown = [names[i] for i in run][:16]
    more = [f"and {len(run) - len(shown)} more"] if len(run) > len(shown) else []
    hover = "\n".join([*shown, *more, *weights])
    return Box(title(names, run, TITLE_CHARACTERS), note, hover, "run")


def ends_box(names: Sequence[str], role: str) -> Box:
    """The box of the model's inputs that a stage reads, or of its outputs."""
    note = role if len(names) == 1 else count(len(names), role)
    text = title(names, range(len(names)), TITLE_CHARACTERS - 1)
    return Box(text, note, "\n".join([*names[:16], note]), "end")


def fold(names: Sequence[str], crossing: Sequence[int], most: int) -> list[range]:
    """Cuts a sequence of operations into runs that share a box."""
    # A run ends where few tensors cross and names change early, so runs tend to be the blocks that
    # a model is made of.
    total = len(names)
    least = -(-total // most)
    runs, start = [], 0

    def badness(end: int) -> tuple[int, int]:
        if end == total:
            return 0, 0
        return crossing[end - 1], len(_common_prefix(names[end - 1 : end + 1]))

    while start < total:
        ends = range(start + least, min(start + 2 * least, total + 1))
        end = min(ends, key=badness) if least > 1 and ends else min(start + least, total)
        runs.append(range(start, end))
        start = end
    return runs


def title(names: Sequence[str], run: range, most: int) -> str:
    """Names a run: its operation, the block that it is, or the operation that it begins with."""
    if len(run) == 1:
        return shorten(names[run.start], most)
    shared = _common_prefix([names[i] for i in run])
    prefix = re.sub(r"[^/_.:\- ]*\Z", "", shared, flags=re.DOTALL)  # up to the last separator
    beside = [names[i] for i in (run.start - 1, run.stop) if 0 <= i < len(names)]
    if len(prefix) > 1 and not any(name.startswith(prefix) for name in beside):
        return f"{shorten(prefix[:-1], most - 2)} …"
    return f"{shorten(names[run.start], most - 2)} …"


def shorten(text: str, most: int) -> str:
    """Shortens a name in its middle, for names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def _common_prefix(names: Sequence[str]) -> str:
    low, high = min(names), max(names)
    same = (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(same, len(low))]
