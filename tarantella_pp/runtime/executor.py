"""Runs one rank's list of actions, and notes when each begins and ends."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor, StageBoundary
from tarantella_pp.runtime.stage.stage_messages import StageMessages
from tarantella_pp.schedule import (
    Action,
    Compute,
    Direction,
    Event,
    Kind,
    Message,
    Reduce,
    Schedule,
    StepTimeline,
    Transfer,
    parse_action,
    send_window,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from tarantella_pp.runtime.batch_step import BatchStep
    from tarantella_pp.runtime.stage.stage import Stage

Values: TypeAlias = "dict[BoundaryTensor, tf.Tensor]"


class Executor:
    """Interprets a schedule's actions on the stages of one rank."""

    def __init__(
        self, stages: Mapping[int, Stage], messages: StageMessages, recorder: Recorder
    ) -> None:
        self.recorder = recorder
        self._stages = stages
        self._messages = messages
        # Activations and gradients, until they are sent or used on this rank.
        self._kept: dict[tuple[Direction, Message], Sequence[tf.Tensor]] = {}
        self._awaited: dict[tuple[Direction, Message], Transfer] = {}

    def run(self, schedule: Schedule, step: BatchStep) -> None:
        """Runs this rank's part of one step."""
        self.clear()
        program = schedule.actions[self._messages.communicator.rank]
        window = send_window(schedule.name, schedule.num_stages, schedule.num_ranks)
        receives = [a for a in program if isinstance(a, Transfer) and a.operation == "R"]
        self._messages.begin(receives, step.sizes, window)
        forwards_left = sum(isinstance(a, Compute) and a.kind == "F" for a in program)
        reduces = False
        for action in program:
            if reduces:  # MPI moves messages only inside its calls
                self._messages.communicator.progress()
            if isinstance(action, Transfer):
                self._transfer(action)  # never waits: only a computation waits, for what it needs
                continue
            if isinstance(action, Reduce):
                reduces = True
                with self.recorder.span(action):
                    step.reduce(action.stage, action.bucket)
                continue
            stage = self._stages[action.stage]
            arrived = self._await_messages(stage.boundary, action)
            start = time.perf_counter()
            if action.kind == "F":
                self._forward(stage, action, arrived, step)
            elif action.kind in ("R", "W"):
                run = stage.repeat if action.kind == "R" else stage.backward_weight
                with self._messages.communicator.computing():
                    run(action.micro_batch)
            else:
                self._backward(stage, action, arrived, step)
            self.recorder.spans.append(Span(action, start, time.perf_counter()))
            if action.kind == "F":
                forwards_left -= 1
                if not forwards_left:
                    step.forwards_done()

    def clear(self) -> None:
        """Drops the values of a step that did not end."""
        self._kept.clear()
        self._awaited.clear()

    def _transfer(self, action: Transfer) -> None:
        """Sends a message, or notes that one will come."""
        if action.operation == "R":
            self._messages.expect(action)
            self._awaited[action.direction, action.message] = action
            return
        start = time.perf_counter()
        # Popped: what was sent is the message's, and its memory is free once it has left.
        self._messages.send(action, self._kept.pop((action.direction, action.message)))
        self.recorder.spans.append(Span(action, start, time.perf_counter()))

    def _await_messages(self, boundary: StageBoundary, action: Compute) -> list[tf.Tensor]:
        """The tensors that a computation needs of other stages, once all of them are here."""
        key = action.micro_batch
        arrived: list[tf.Tensor] = []
        if action.kind == "F":
            for edge in boundary.receives:
                arrived += self._arrived("F", (edge.source, edge.target, key))
        elif action.kind in ("B", "BW"):
            for edge in boundary.sends:
                if edge.gradients:
                    arrived += self._arrived("B", (edge.target, edge.source, key))
        return arrived

    def _arrived(self, direction: Direction, message: Message) -> Sequence[tf.Tensor]:
        """The tensors of a message: from this rank, or from another once they are here."""
        action = self._awaited.pop((direction, message), None)
        if action is None:
            return self._kept.pop((direction, message))
        start = time.perf_counter()
        arrived = self._messages.receive(action)
        self.recorder.spans.append(Span(action, start, time.perf_counter()))
        return arrived

    def _forward(
        self, stage: Stage, action: Compute, arrived: Sequence[tf.Tensor], step: BatchStep
    ) -> None:
        boundary, key = stage.boundary, action.micro_batch
        inputs = [*step.data(boundary.index, key), *arrived]
        with self._messages.communicator.computing():
            if step.training:
                outputs, added = stage.forward(key, inputs, step.share(key))
            else:
                outputs, added = stage.evaluate(inputs, step.share(key), step.predicts)
        values: Values = dict(zip(boundary.outputs, outputs, strict=True))
        for edge in boundary.sends:
            self._kept["F", (edge.source, edge.target, key)] = _pick(values, edge.tensors)
        if added is not None:
            step.add(boundary.index, key, added)
        if boundary.model_outputs:
            step.finish(key, _pick(values, boundary.model_outputs))

    def _backward(
        self, stage: Stage, action: Compute, arrived: Sequence[tf.Tensor], step: BatchStep
    ) -> None:
        boundary, key = stage.boundary, action.micro_batch
        sums: Values = dict(step.loss_gradients(key)) if boundary.model_outputs else {}
        tensors = [tensor for edge in boundary.sends for tensor in edge.gradients]
        # An output that several stages read gets a gradient from each of them.
        for tensor, gradient in zip(tensors, arrived, strict=True):
            sums[tensor] = sums[tensor] + gradient if tensor in sums else gradient
        seeds = [
            step.added_factors(boundary.index, key),
            *(sums[tensor] for tensor in boundary.outputs_with_gradient),
        ]
        run = stage.backward if action.kind == "BW" else stage.backward_input
        with self._messages.communicator.computing():
            results = run(key, seeds)
        gradients = dict(zip(boundary.input_gradients, results, strict=True))
        for edge in boundary.receives:
            if edge.gradients:
                message = (edge.target, edge.source, key)
                self._kept["B", message] = _pick(gradients, edge.gradients)


def _pick(values: Values, tensors: Sequence[BoundaryTensor]) -> list[tf.Tensor]:
    return [values[tensor] for tensor in tensors]


UPDATE, LOGS, TIES = "update", "logs", "tied weights"
REDUCTIONS = "sums over replicas"
# Names of the spans of a step that are no actions of its schedule.
SPAN_NAMES = (UPDATE, LOGS, TIES, REDUCTIONS)
# Of how many of the last steps it is known how long the rank computed and waited.
MOST_SHARES = 1000


class Span(NamedTuple):
    """Something that a rank did."""

    what: Action | str  # an action of the schedule, or one of the names above
    start: float  # seconds of the rank's own clock
    end: float  # seconds of the rank's own clock

    @property
    def kind(self) -> Kind | None:
        """Which computation it was, if it was one."""
        return self.what.kind if isinstance(self.what, Compute) else None

    @property
    def transfer(self) -> Transfer | None:
        """The message that was sent or waited for, if it was one."""
        return self.what if isinstance(self.what, Transfer) else None

    @property
    def is_busy(self) -> bool:
        """Whether the rank computes meanwhile."""
        return isinstance(self.what, Compute | Reduce) or self.what == UPDATE

    @property
    def is_wait(self) -> bool:
        """Whether the rank waits for a message meanwhile."""
        receives = self.transfer is not None and self.transfer.operation == "R"
        return receives or self.what in (TIES, REDUCTIONS)


class Recorder:
    """Keeps of every step how long this rank computed and waited, of some all that it did."""

    def __init__(self, steps: int | range) -> None:
        least = steps[0] + 1 if isinstance(steps, range) and steps else steps
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ConfigurationError(
                "Expected how many of the last steps to keep, or a range of their numbers such as "
                f"range(10, 15). Received: steps={steps!r}"
            )
        self._numbers = None if isinstance(steps, int) else steps
        # Those that are kept, in order, as of this rank alone.
        self.steps: deque[RecordedStep] = deque(maxlen=steps if isinstance(steps, int) else None)
        self._count = 0
        self._begun: deque[tuple[float, float, float, float]] = deque(maxlen=MOST_SHARES)
        self.spans: MutableSequence[Span] = deque(maxlen=0)

    @contextlib.contextmanager
    def step(self, schedule: Schedule, rows: int) -> Iterator[None]:
        """Records one step; a step that fails is not kept."""
        start, spans = time.perf_counter(), list[Span]()
        self.spans = spans
        try:
            yield
        finally:
            self.spans = deque(maxlen=0)  # evaluation and prediction are not recorded
        end = time.perf_counter()
        # Two numbers of each step, so that logs need not keep all spans.
        busy = sum(span.end - span.start for span in spans if span.is_busy)
        wait = sum(span.end - span.start for span in spans if span.is_wait)
        self._begun.append((start, end, busy, wait))
        if self._numbers is None or self._count in self._numbers:
            record = RecordedStep(self._count, schedule, rows, ((start, end),), (tuple(spans),))
            self.steps.append(record)
        self._count += 1

    @contextlib.contextmanager
    def span(self, what: Action | str) -> Iterator[None]:
        """Records one span."""
        start = time.perf_counter()
        yield
        self.spans.append(Span(what, start, time.perf_counter()))

    def take_shares(self) -> tuple[float, float]:
        """Returns which parts of its time this rank computed and waited since the last call."""
        # A step lasts until the next one begins, the last one until its own end. The median leaves
        # out the steps in which TensorFlow traces its functions.
        steps = list(self._begun)
        self._begun.clear()
        if not steps:
            return 0.0, 0.0
        ends = [*(step[0] for step in steps[1:]), steps[-1][1]]
        shares = [
            (busy / (end - start), wait / (end - start))
            for (start, _, busy, wait), end in zip(steps, ends, strict=True)
        ]
        return median(b for b, _ in shares), median(w for _, w in shares)


@dataclass(frozen=True)
class RecordedStep:
    """One training step, of one rank or of all."""

    number: int  # number of the step since recording began, from 0
    schedule: Schedule  # the schedule that it ran, with its messages
    rows: int
    # For each rank, when the step began and ended there, in seconds of rank 0's clock
    bounds: tuple[tuple[float, float], ...]
    # What each rank did, in order, on the same clock; a receive is the wait for its message
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def origin(self) -> float:
        """When the first computation began."""
        return min(span.start for spans in self.spans for span in spans if span.kind)

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
        serial = sum(span.end - span.start for spans in self.spans for span in spans if span.kind)
        return StepTimeline(self.schedule.name, self.schedule.placement, events, serial)


def gather_steps(
    records: Sequence[RecordedStep], offset: float, communicator: Communicator
) -> tuple[RecordedStep, ...]:
    """Puts the records of all ranks together; all of them must call this."""
    mine = []
    for record in records:
        [(start, end)], [spans] = record.bounds, record.spans
        moved = [[str(span.what), span.start + offset, span.end + offset] for span in spans]
        mine.append([[start + offset, end + offset], moved])
    steps = zip(records, *communicator.allgather_json(mine), strict=True)
    return tuple(
        replace(
            record,
            bounds=tuple((start, end) for (start, end), _ in ranks),
            spans=tuple(
                tuple(Span(w if w in SPAN_NAMES else parse_action(w), *when) for w, *when in spans)
                for _, spans in ranks
            ),
        )
        for record, *ranks in steps
    )


def alike(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Returns the steps of the schedule and batch size that occur most; a last batch is smaller."""
    kinds = Counter((id(step.schedule), step.rows) for step in steps)
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    return [step for step in steps if (id(step.schedule), step.rows) == most]
