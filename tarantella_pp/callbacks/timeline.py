"""`Timeline`: records what every rank does in training, and when; its summary and its trace."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import keras
import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files import replace_file
from tarantella_pp.runtime import executor
from tarantella_pp.runtime.comm.machine import clock_offset

# The trace is in Google's "Trace Event Format": a process for each rank, with a track each for what
# it computes, for its messages and for its steps, and an arrow from each send to its receive.
COMPUTE, COMMUNICATION, STEPS = 1, 2, 3
_TRACKS = {COMPUTE: "compute", COMMUNICATION: "communication", STEPS: "steps"}
_KINDS = {
    "F": "forward", "R": "forward again", "B": "input gradient", "W": "weight gradient",
    "BW": "backward",
}  # fmt: skip
_INSIDE = 10  # nanoseconds: what belongs to a slice must not be at its very end

TraceEvent = dict[str, Any]

_COLUMNS: dict[str, Callable[[executor.Span], bool]] = {
    "F": lambda span: span.kind == "F",
    "B": lambda span: span.kind in ("R", "B", "BW"),
    "W": lambda span: span.kind == "W",
    "Update": lambda span: span.what == executor.UPDATE,
    "Wait": lambda span: span.is_wait,
}


class Timeline(keras.callbacks.Callback):
    """Records what every rank of a pipeline does, and writes it as a trace.

    At the end of training one file has the forward and backward passes, sends and waits of all
    ranks, on one clock, with an arrow from each send to its receive. Open it at
    https://ui.perfetto.dev or in chrome://tracing.

    At the end of each epoch the logs get how ranks spent their time, on average: `busy` is the
    part in which they compute, `wait` that in which they wait for messages, and `bubble` all in
    which they do not compute. Recording takes one or two microseconds for each pass and message.

    Every rank must have the callback. Steps are counted from 0 over all epochs.

    Args:
        path: The file, in Chrome's trace format. Default: none is written.
        steps: The steps in the file: how many of the last ones, or a range of their numbers such as
            `range(10, 15)`.

    Raises:
        ConfigurationError: If `steps` names no step.
        FileError: When training begins, if the file cannot be written.

    Example::

        timeline = tnt.callbacks.Timeline("trace.json")
        model.fit(x, y, callbacks=[timeline])
        timeline.summary()
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, steps: int | range = 10) -> None:
        super().__init__()
        self._path = None if path is None else Path(path).absolute()
        self._wanted = steps
        self._recorder = executor.Recorder(steps)
        self._steps: tuple[executor.RecordedStep, ...] = ()

    @property
    def steps(self) -> tuple[executor.RecordedStep, ...]:
        """The recorded steps, on every rank; empty until training has ended."""
        return self._steps

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Begins to record."""
        self._recorder = executor.Recorder(self._wanted)
        self._steps = ()
        if (path := self._path) is not None and self._engine().communicator.prints:
            with contextlib.suppress(OSError):  # which the next lines say
                path.parent.mkdir(parents=True, exist_ok=True)
            # What cannot be written is refused before training; an older trace stays till its end.
            if path.is_file():
                replace_file(path, lambda draft: shutil.copy2(path, draft))
            else:
                write_trace(path, ())
        self._engine().record(self._recorder)

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        """Adds to the logs how time was spent; all ranks come here together."""
        ranks = self._engine().groups.pipeline.allgather_json(list(self._recorder.take_shares()))
        busy, wait = (sum(part) / len(ranks) for part in zip(*ranks, strict=True))
        if logs is not None:
            logs.update(bubble=1.0 - busy, busy=busy, wait=wait)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Ends recording and writes the file; all ranks come here together."""
        engine = self._engine()
        engine.record(None)
        offset = clock_offset(engine.groups.pipeline)
        self._steps = executor.gather_steps(self._recorder.steps, offset, engine.groups.pipeline)
        if self._path is not None and engine.communicator.prints:
            try:
                write_trace(self._path, self._steps)
            except FileError as error:  # the model is trained, and its script goes on
                warnings.warn(f"There is no trace of this training: {error}", stacklevel=2)

    def summary(self) -> None:
        """Prints where each rank's time went.

        Raises:
            ConfigurationError: If nothing was recorded.
        """
        if not (same := executor.alike(self._steps)):
            raise ConfigurationError(
                "No steps were recorded: a Timeline has a summary once `fit` has ended, if it had "
                f"the steps that were asked for. Received: steps={self._wanted!r}"
            )
        Console().print(summary_table(same))

    def _engine(self) -> Any:
        engine = getattr(self.model, "_engine", None)
        if engine is None:
            raise ConfigurationError(
                "Timeline records the ranks of a tnt.PipelineModel. "
                f"Received: a model of class {type(self.model).__name__}"
            )
        return engine


def summary_table(steps: Sequence[executor.RecordedStep]) -> Group:
    """Makes the table of recorded steps: a row for each rank, then what holds for all of them."""
    schedule = steps[0].schedule
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("Rank", "Stages", *_COLUMNS, "Other", "Step ms", "Busy"):
        rows.add_column(name, justify="right", no_wrap=True)
    kinds = (*_COLUMNS.values(), lambda span: span.is_busy)
    for rank in range(schedule.num_ranks):
        *parts, busy = (median(_seconds(s.spans[rank], wanted) for s in steps) for wanted in kinds)
        period = _period(steps, rank)
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        times = (f"{1e3 * seconds:.2f}" for seconds in (*parts, period - sum(parts), period))
        rows.add_row(str(rank), stages, *times, f"{100 * busy / period:.1f}%")
    several = "" if schedule.num_micro_batches == 1 else "es"
    title = (
        f"{schedule.name}, {schedule.num_micro_batches} micro-batch{several} of a batch of "
        f"{steps[0].rows}; milliseconds in a step, medians of {len(steps)}"
    )
    inner = median(step.timeline.step_seconds for step in steps)
    bubble = median(step.timeline.bubble_fraction for step in steps)
    last = f"From the first pass to the last: {1e3 * inner:.2f} ms. Bubble in this: {bubble:.1%}."
    return Group(Text(title, style="bold"), rows, Text(last))


def _seconds(spans: Sequence[executor.Span], wanted: Callable[[executor.Span], bool]) -> float:
    return sum(span.end - span.start for span in spans if wanted(span))


def _period(steps: Sequence[executor.RecordedStep], rank: int) -> float:
    """Returns the seconds from one step to the next; of a single step, its own."""
    starts = {step.number: step.bounds[rank][0] for step in steps}
    ends = {step.number: step.bounds[rank][1] for step in steps}
    return median(starts.get(number + 1, ends[number]) - starts[number] for number in starts)


def write_trace(path: Path, steps: Sequence[executor.RecordedStep]) -> None:
    """Writes recorded steps to a file, all of it or nothing."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(steps)}
    replace_file(path, lambda draft: draft.write_bytes(msgspec.json.encode(document)))


def trace_events(steps: Sequence[executor.RecordedStep]) -> list[TraceEvent]:
    """Makes the events of a trace; times are in microseconds since the first step began."""
    if not steps:
        return []
    zero = min(start for start, _ in steps[0].bounds)
    trace = _Trace()
    trace.name_ranks(steps[0].schedule.placement)
    for step in steps:
        for rank, (start, end) in enumerate(step.bounds):
            bounds = executor.Span(f"step {step.number}", start, end)
            trace.add_slice(rank, STEPS, bounds, zero, {"rows": step.rows})
        trace.add_spans(step, zero)
    return trace.events


class _Trace:
    """Events, each on a track of a process, which is a rank."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._arrows = itertools.count(1)

    def _add(self, process: int, track: int, **fields: Any) -> None:
        # Perfetto takes tracks with the number 0, or their process's, for one and the same.
        self.events.append({"pid": process, "tid": 10 * process + track, **fields})

    def name_ranks(self, placement: Sequence[int]) -> None:
        """Names processes and tracks, and puts them in order."""
        for rank in range(max(placement) + 1):
            stages = ", ".join(str(s) for s, owner in enumerate(placement) if owner == rank)
            self._name(rank, COMPUTE, "process_name", name=f"rank {rank}")
            self._name(rank, COMPUTE, "process_labels", labels=f"stage {stages}")
            self._name(rank, COMPUTE, "process_sort_index", sort_index=rank)
            for track, name in _TRACKS.items():
                self._name(rank, track, "thread_name", name=name)
                self._name(rank, track, "thread_sort_index", sort_index=track)

    def _name(self, process: int, track: int, kind: str, **values: Any) -> None:
        self._add(process, track, ph="M", name=kind, args=values)

    def add_spans(self, step: executor.RecordedStep, zero: float) -> None:
        """Adds the slices of one step, and the arrows between them."""
        numbers: dict[tuple[Any, ...], int] = {}
        for rank, spans in enumerate(step.spans):
            for span in spans:
                track = COMPUTE if span.is_busy else COMMUNICATION
                facts = {} if isinstance(span.what, str) else dict(span.what._asdict())
                facts.pop("operation", None)
                facts["step"] = step.number
                start, end = self.add_slice(rank, track, span, zero, facts)
                if (transfer := span.transfer) is not None:
                    key = (transfer.direction, transfer.message)
                    number = numbers.setdefault(key, next(self._arrows))
                    # At the start of a send, just before the end of a receive.
                    sends = transfer.operation == "S"
                    kind = {"ph": "s"} if sends else {"ph": "f", "bp": "e"}
                    moment = _written(start if sends else max(start, end - _INSIDE))
                    message = {"id": number, "name": "message", "cat": "message", "ts": moment}
                    self._add(rank, COMMUNICATION, **kind, **message)

    def add_slice(
        self, process: int, track: int, span: executor.Span, zero: float, facts: dict[str, Any]
    ) -> tuple[int, int]:
        """Adds what a rank does for a while; returns from when to when, in nanoseconds."""
        name, category = _look(span)
        start, end = (math.floor(1e9 * (moment - zero)) for moment in (span.start, span.end))
        times = {"ts": _written(start), "dur": _written(max(0, end - start - 1))}
        self._add(process, track, ph="X", name=name, cat=category, args=facts, **times)
        return start, end


def _written(nanoseconds: int) -> float:
    """Writes a time in microseconds from which Perfetto reads the same number of nanoseconds."""
    # It makes whole nanoseconds of starts and lengths by themselves, and drops a slice that begins
    # one of them before the last one has ended.
    return (nanoseconds + 0.25) / 1000


def _look(span: executor.Span) -> tuple[str, str]:
    waits, transfer = span.is_wait, span.transfer
    if span.kind is not None:
        return str(span.what), _KINDS[span.kind]
    if transfer is None:
        return str(span.what), "wait" if waits else "step"
    verb = "send" if transfer.operation == "S" else "receive"
    name = f"{verb} {transfer.direction}{transfer.micro_batch} {transfer.source}>{transfer.target}"
    return name, "wait" if waits else "send"
