"""A training step of all ranks as it was recorded, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.tracing.recorder import (
    LOGS,
    METRICS,
    REDUCTIONS,
    SUMS,
    TIES,
    UPDATE,
    Span,
    StepRecord,
)
from tarantella_pp.schedule import Compute, Schedule, Transfer, parse_action
from tarantella_pp.simulation import Event, StepTimeline


@dataclass(frozen=True)
class RecordedStep:
    """One training step.

    Attributes:
        number: Number of the step since recording began, from 0.
        schedule: The schedule that it ran, with its messages.
        rows: Samples of the batch.
        bounds: For each rank, when the step began and ended there, in seconds of rank 0's clock.
        spans: What each rank did, in order, on the same clock.
    """

    number: int
    schedule: Schedule
    rows: int
    bounds: tuple[tuple[float, float], ...]
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def origin(self) -> float:
        """When the first computation began."""
        return min(span.start for spans in self.spans for span in spans if _computes(span))

    @cached_property
    def timeline(self) -> StepTimeline:
        """The actions of the schedule, with seconds from the first computation on.

        As in a simulation, a wait counts from the moment the rank has nothing else to do; one
        that began before the first computation of all counts from there.
        """
        events = tuple(
            tuple(
                Event(rank, max(0.0, start - self.origin), max(0.0, end - self.origin), what)
                for what, start, end in spans
                if not isinstance(what, str)
            )
            for rank, spans in enumerate(self.spans)
        )
        serial = sum(
            span.end - span.start for spans in self.spans for span in spans if _computes(span)
        )
        return StepTimeline(self.schedule.name, events, serial, (0.0,) * len(events))

    def messages(self) -> Iterator[tuple[Transfer, Span, Span]]:
        """Iterates over the messages: the send as an action, its span and that of the wait."""
        transfers = [
            (span.what, span)
            for spans in self.spans
            for span in spans
            if isinstance(span.what, Transfer)
        ]
        sends = {(a.direction, a.message): (a, span) for a, span in transfers if a.operation == "S"}
        for action, wait in transfers:
            if action.operation == "R":
                yield *sends[action.direction, action.message], wait


def gather_steps(
    records: Sequence[StepRecord], offset: float, communicator: Communicator
) -> tuple[RecordedStep, ...]:
    """Puts the records of all ranks together; all of them must call this."""
    known = [(record, record.schedule) for record in records if record.schedule is not None]
    mine = [
        [
            [record.start + offset, record.end + offset],
            [[str(what), start + offset, end + offset] for what, start, end in record.spans],
        ]
        for record, _ in known
    ]
    steps = zip(known, *communicator.allgather_json(mine), strict=True)
    return tuple(
        RecordedStep(
            number=record.number,
            schedule=schedule,
            rows=record.rows,
            bounds=tuple((start, end) for (start, end), _ in ranks),
            spans=tuple(tuple(map(_span, spans)) for _, spans in ranks),
        )
        for (record, schedule), *ranks in steps
    )


def _span(fields: Sequence[Any]) -> Span:
    what, start, end = fields
    return Span(
        what if what in (UPDATE, LOGS, TIES, SUMS, METRICS, REDUCTIONS) else parse_action(what),
        start,
        end,
    )


def _computes(span: Span) -> bool:
    return isinstance(span.what, Compute)
