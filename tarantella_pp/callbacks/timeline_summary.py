"""Where each rank's time went, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tarantella_pp.runtime.tracing.recorded_step import RecordedStep
from tarantella_pp.runtime.tracing.recorder import (
    SUMS,
    UPDATE,
    Span,
    is_busy,
    is_wait,
)
from tarantella_pp.schedule import Compute
from tarantella_pp.simulation import StepTimeline

_COLUMNS: dict[str, Callable[[Span], bool]] = {
    "F": lambda span: isinstance(span.what, Compute) and span.what.kind == "F",
    "B": lambda span: isinstance(span.what, Compute) and span.what.kind in ("B", "BW"),
    "W": lambda span: (
        span.what == SUMS or (isinstance(span.what, Compute) and span.what.kind == "W")
    ),
    "Update": lambda span: span.what == UPDATE,
    "Wait": lambda span: is_wait(span.what),
}


def summary_table(steps: Sequence[RecordedStep], simulation: StepTimeline) -> Group:
    """Makes the table of recorded steps: a row for each rank, then what holds for all of them."""
    schedule = steps[0].schedule
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("Rank", "Stages", *_COLUMNS, "Other", "Step ms", "Busy"):
        rows.add_column(name, justify="right", no_wrap=True)
    for rank in range(schedule.num_ranks):
        parts = [
            median(_seconds(step.spans[rank], wanted) for step in steps)
            for wanted in _COLUMNS.values()
        ]
        busy = median(_seconds(step.spans[rank], lambda s: is_busy(s.what)) for step in steps)
        period = _period(steps, rank)
        rows.add_row(
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            *(f"{1e3 * seconds:.2f}" for seconds in (*parts, period - sum(parts), period)),
            f"{100 * busy / period:.1f}%",
        )
    title = (
        f"{schedule.name}, {schedule.num_micro_batches} micro-batches of a batch of "
        f"{steps[0].rows}; milliseconds in a step, medians of {len(steps)}"
    )
    return Group(Text(title, style="bold"), rows, Text(_compared(steps, simulation)))


def _compared(steps: Sequence[RecordedStep], simulation: StepTimeline) -> str:
    """Returns the line that compares the schedule's part of a step with its simulation."""
    measured = median(step.timeline.step_seconds for step in steps)
    bubble = median(step.timeline.bubble_fraction for step in steps)
    return (
        f"From the first pass to the last: {1e3 * measured:.2f} ms, "
        f"simulated {1e3 * simulation.step_seconds:.2f} ms "
        f"({simulation.step_seconds / measured - 1:+.1%}). "
        f"Bubble in this: {bubble:.1%}, simulated {simulation.bubble_fraction:.1%}."
    )


def _seconds(spans: Sequence[Span], wanted: Callable[[Span], bool]) -> float:
    return sum(span.end - span.start for span in spans if wanted(span))


def _period(steps: Sequence[RecordedStep], rank: int) -> float:
    """Returns the seconds from one step to the next; of a single step, its own."""
    starts = {step.number: step.bounds[rank][0] for step in steps}
    ends = {step.number: step.bounds[rank][1] for step in steps}
    return median(starts.get(number + 1, ends[number]) - starts[number] for number in starts)
