"""The tables that `tarantella simulate` prints."""

from __future__ import annotations

import math
import shutil
from typing import Any

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan_config import common_limit
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, ScalePoint
from tarantella_pp.simulation.pipelines import PipelineStep


def summary(
    simulation: PlanSimulation, step: PipelineStep, point: ScalePoint, balance: float
) -> list[Any]:
    """Makes the lines at the top."""
    from rich.text import Text

    plan = simulation.plan
    sums = point.exposed_seconds
    summed = f", of which {_seconds(sums)} wait for sums of gradients" if sums else ""
    over = ""
    if (limits := plan.limits) is not None:
        limit = common_limit(limits)
        size = "each stage" if limit is None else format_bytes(limit)
        if len(limits) != len(step.peak_bytes):  # limits are of stages, not of ranks with several
            limits = (min(limits),) * len(step.peak_bytes)
        fits = all(peak <= own for peak, own in zip(step.peak_bytes, limits, strict=True))
        over = f", {'within' if fits else 'ABOVE'} the plan's limit of {size}"
    bubble = f"{100 * step.bubble_fraction:.1f} %, {100 * balance:.1f} % without messages"
    title = (
        f"A step of '{plan.model}': {plan.num_stages} stages on {point.num_ranks} ranks, "
        f"{simulation.schedule}, {_count(simulation.micro_batches, 'micro-batch')} of "
        f"{simulation.micro_batch_size}, {_count(point.num_replicas, 'replica')}"
    )
    return [
        Text(title, style="bold"),
        f"Step:       {_seconds(point.step_seconds)}{summed}",
        f"Throughput: {point.samples_per_second:.4g} samples/s, {point.speed_up:.2f} x one rank",
        f"Bubble:     {bubble}",
        f"Memory:     {format_bytes(max(step.peak_bytes))} on the largest rank{over}",
    ]


def rank_table(step: PipelineStep) -> Any:
    """Makes the table of the ranks of one pipeline."""
    from rich import box
    from rich.table import Table

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Rank", "Stages", "Computes", "Idle", "Memory"):
        rows.add_column(name, justify="right")
    for rank, (busy, peak) in enumerate(zip(step.busy_seconds, step.peak_bytes, strict=True)):
        stages = [str(s) for s, owner in enumerate(step.placement) if owner == rank]
        idle = 1 - busy / (step.pipeline_seconds or 1.0)
        rows.add_row(
            str(rank), " ".join(stages), _seconds(busy), f"{100 * idle:.1f} %", format_bytes(peak)
        )
    return rows


def curve_table(curve: list[ScalePoint]) -> Any:
    """Makes the table of the scaling curve."""
    from rich import box
    from rich.table import Table

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Ranks", "Replicas", "Step", "Samples/s", "Speed-up", "Efficiency"):
        rows.add_column(name, justify="right")
    for point in curve:
        rows.add_row(
            f"{point.num_ranks:,}",
            f"{point.num_replicas:,}",
            _seconds(point.step_seconds),
            f"{point.samples_per_second:.4g}",
            f"{point.speed_up:.4g}",
            f"{100 * point.efficiency:.1f} %",
        )
    return rows


def scale_lines(simulation: PlanSimulation) -> list[str]:
    """Says what is assumed of many ranks."""
    lines, ring, nodes = [], "in a ring", simulation.nodes
    if nodes is not None:
        card, inside = ((speed or math.inf) / 1e9 for speed in (nodes.card, nodes.inside))
        lines.append(
            f"hosts have {_count(nodes.ranks_per_node, 'rank')}, do {inside:g} GB/s between two of "
            f"them and have a card of {card:g} GB/s in each direction, of which all ranks that "
            f"send to other hosts have an equal part; {simulation.machine.latency * 1e6:g} us each."
        )
        ring = "inside each host, then in a ring of hosts"
    return [
        *lines,
        "the batch grows with the replicas, each of which has the plan's samples.",
        f"replicas sum a stage's gradients {ring} once all are there, while others compute.",
    ]


def drawing(step: PipelineStep) -> str:
    """Draws the timeline as wide as the terminal."""
    if step.timeline is None:
        return "The pipeline is too large to be played, so there is no timeline."
    columns = shutil.get_terminal_size((100, 24)).columns
    return step.timeline.to_text(max(40, columns - 12))


def _seconds(value: float) -> str:
    """Writes a time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{'' if number == 1 else plural}"
