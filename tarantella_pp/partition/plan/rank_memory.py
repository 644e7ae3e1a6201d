"""The memory of ranks: what a plan says, and what they have really taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import MeasuredPeak


class RankMemory(NamedTuple):
    """One rank of a pipeline, or that with most of its replicas.

    Attributes:
        stages: Its stages.
        planned: Bytes that were planned for them.
        measured: What it has taken.
        limit: Bytes that it may take; `None` for any.
    """

    stages: list[int]
    planned: int
    measured: MeasuredPeak
    limit: int | None


def planned_of_ranks(plan: Plan, num_ranks: int) -> list[int]:
    """Returns the planned bytes of each rank of a pipeline of so many."""
    found = [0] * num_ranks
    placement = plan.schedule_spec(num_ranks).placement
    for rank, stage in zip(placement, plan.stages, strict=True):
        found[rank] += stage.memory_bytes
    return found


def memory_of_ranks(plan: Plan) -> list[RankMemory]:
    """Returns planned and measured memory of each rank of a pipeline; nothing before a step."""
    if not plan.measured:
        return []
    placement, limits = plan.schedule_spec(len(plan.measured)).placement, plan.limits
    found = []
    each = zip(planned_of_ranks(plan, len(plan.measured)), plan.measured, strict=True)
    for rank, (planned, measured) in enumerate(each):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        limit = None if limits is None else sum(limits[stage] for stage in stages)
        found.append(RankMemory(stages, planned, measured, limit))
    return found


def measured_of_stages(plan: Plan) -> list[MeasuredPeak] | None:
    """Returns the measured memory of each stage, where each has a rank of its own."""
    ranks = memory_of_ranks(plan)
    alone = [rank.stages for rank in ranks] == [[stage] for stage in range(plan.num_stages)]
    return [rank.measured for rank in ranks] if alone else None


def measured_text(peak: MeasuredPeak, *, short: bool = False) -> str:
    """Writes a measured size; `<` before one of which it is only known that it was not more."""
    return ("" if peak.exact else "<") + format_bytes(peak.bytes, short=short)


def measured_lines(plan: Plan) -> list[str]:
    """Returns what each rank has taken, if that was measured, and what that means."""
    ranks = memory_of_ranks(plan)
    if not ranks:
        return []
    each = "; ".join(
        f"{i} took {measured_text(rank.measured)} of {format_bytes(rank.planned)} planned"
        for i, rank in enumerate(ranks)
    )
    return [f"Measured memory of ranks: {each}.", measured_note(plan.measured)]


def measured_note(peaks: Sequence[MeasuredPeak]) -> str:
    """Says what was measured."""
    what = "resident memory, with TensorFlow's graphs and code"
    if peaks[0].on_gpu:
        what = "what TensorFlow's allocator gave out on the GPU"
    note = "" if all(peak.exact for peak in peaks) else "; < is no more than this"
    return f"Measured = peak of {what}, less what was there before the model{note}."
