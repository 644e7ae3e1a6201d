"""Recorded steps as a trace that Perfetto and chrome://tracing show.

The format is Google's "Trace Event Format": a process for each rank, with a track each for what
it computes, for its messages and for its steps, and an arrow from each send to its receive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.runtime.tracing.recorder import (
    RecordedStep,
    Span,
    is_busy,
    is_wait,
)
from tarantella_pp.schedule import Action, Compute, Transfer
from tarantella_pp.simulation import StepTimeline

COMPUTE, COMMUNICATION, STEPS = 1, 2, 3
_TRACKS = {COMPUTE: "compute", COMMUNICATION: "communication", STEPS: "steps"}
_KINDS = {
    "F": ("forward", "thread_state_running"),
    "B": ("input gradient", "rail_response"),
    "W": ("weight gradient", "rail_animation"),
    "BW": ("backward", "rail_response"),
}
"""Category and colour, among those that chrome://tracing knows."""
_WAIT_COLOUR = "thread_state_iowait"
_INSIDE = 10
"""Nanoseconds: what belongs to a slice must not be at its very end."""

TraceEvent = dict[str, Any]


def write_trace(
    path: Path, steps: Sequence[RecordedStep], simulation: tuple[StepTimeline, float] | None = None
) -> None:
    """Writes recorded steps to a file, all of it or nothing."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(steps, simulation)}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.encode(document))
    partial.replace(path)


def trace_events(
    steps: Sequence[RecordedStep], simulation: tuple[StepTimeline, float] | None = None
) -> list[TraceEvent]:
    """Makes the events of a trace; times are in microseconds since the first step began."""
    if not steps:
        return []
    zero = min(start for start, _ in steps[0].bounds)
    arrows = itertools.count(1)
    placement = steps[0].schedule.placement
    events = list(_names(0, placement, ""))
    for step in steps:
        about = {"step": step.number}
        for rank, (start, end) in enumerate(step.bounds):
            bounds = Span(f"step {step.number}", start, end)
            events.append(_slice(rank, STEPS, bounds, zero, {"rows": step.rows}))
        events += _pictured(0, step.spans, zero, about, arrows)
    if simulation is not None:
        timeline, start = simulation
        spans = [[Span(e.action, e.start, e.end) for e in own] for own in timeline.events]
        events += _names(len(spans), placement, " simulated")
        events += _pictured(len(spans), spans, zero - start, {}, arrows)
    return events


def _names(first: int, placement: Sequence[int], suffix: str) -> Iterator[TraceEvent]:
    """Names processes and tracks, and puts them in order."""
    for rank in range(max(placement) + 1):
        stages = ", ".join(str(s) for s, owner in enumerate(placement) if owner == rank)
        process = first + rank
        yield _metadata(process, COMPUTE, "process_name", name=f"rank {rank}{suffix}")
        yield _metadata(process, COMPUTE, "process_labels", labels=f"stage {stages}")
        yield _metadata(process, COMPUTE, "process_sort_index", sort_index=process)
        for track, name in _TRACKS.items():
            yield _metadata(process, track, "thread_name", name=name)
            yield _metadata(process, track, "thread_sort_index", sort_index=track)


def thread_id(process: int, track: int) -> int:
    """Returns the number of a track, one that no other track of any process has.

    Perfetto takes tracks with the number 0, or their process's, for one and the same.
    """
    return 10 * process + track


def _metadata(process: int, track: int, kind: str, **values: Any) -> TraceEvent:
    tid = thread_id(process, track)
    return {"ph": "M", "pid": process, "tid": tid, "name": kind, "args": values}


def _pictured(
    first: int,
    ranks: Iterable[Sequence[Span]],
    zero: float,
    about: dict[str, Any],
    arrows: Iterator[int],
) -> Iterator[TraceEvent]:
    """Makes the slices of one step, and the arrows between them."""
    numbers: dict[tuple[Any, ...], int] = {}
    for rank, spans in enumerate(ranks):
        for span in spans:
            track = COMPUTE if is_busy(span.what) else COMMUNICATION
            yield _slice(first + rank, track, span, zero, {**about, **_facts(span.what)})
            if isinstance(span.what, Transfer):
                key = (span.what.direction, span.what.message)
                number = numbers.setdefault(key, next(arrows))
                yield _arrow(first + rank, span.what, span, zero, number)


def _slice(process: int, track: int, span: Span, zero: float, facts: dict[str, Any]) -> TraceEvent:
    category, colour = _look(span.what)
    start, end = _nanoseconds(span.start - zero), _nanoseconds(span.end - zero)
    event = {
        "ph": "X", "pid": process, "tid": thread_id(process, track),
        "name": _name(span.what), "cat": category, "args": facts,
        "ts": _written(start), "dur": _written(max(0, end - start - 1)),
    }  # fmt: skip
    return event if colour is None else {**event, "cname": colour}


def _arrow(process: int, what: Transfer, span: Span, zero: float, number: int) -> TraceEvent:
    """Makes one end of an arrow: at the start of a send, just before the end of a receive."""
    start, end = _nanoseconds(span.start - zero), _nanoseconds(span.end - zero)
    if what.operation == "S":
        kind, moment = {"ph": "s"}, start
    else:
        kind, moment = {"ph": "f", "bp": "e"}, max(start, end - _INSIDE)
    return {
        **kind, "pid": process, "tid": thread_id(process, COMMUNICATION),
        "id": number, "name": "message", "cat": "message", "ts": _written(moment),
    }  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return math.floor(1e9 * seconds)


def _written(nanoseconds: int) -> float:
    """Writes a time in microseconds from which Perfetto reads the same number of nanoseconds.

    It makes whole nanoseconds of starts and lengths by themselves, and drops a slice that begins
    one of them before the last one has ended.
    """
    return (nanoseconds + 0.25) / 1000


def _look(what: Action | str) -> tuple[str, str | None]:
    """Returns category and colour."""
    if isinstance(what, Compute):
        return _KINDS[what.kind]
    if is_wait(what):
        return "wait", _WAIT_COLOUR
    return ("send" if isinstance(what, Transfer) else "step"), None


def _name(what: Action | str) -> str:
    if isinstance(what, Transfer):
        verb = "send" if what.operation == "S" else "receive"
        return f"{verb} {what.direction}{what.micro_batch} {what.source}>{what.target}"
    return str(what)


def _facts(what: Action | str) -> dict[str, Any]:
    if isinstance(what, str):
        return {}
    facts = dict(what._asdict())
    return {name: value for name, value in facts.items() if name != "operation"}
