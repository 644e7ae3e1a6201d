"""What one rank does in its training steps, and when."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.schedule import Action, Compute, Reduce, Schedule, Transfer

UPDATE, LOGS, TIES = "update", "logs", "tied weights"
METRICS, REDUCTIONS = "metrics", "sums over replicas"
SPAN_NAMES = (UPDATE, LOGS, TIES, METRICS, REDUCTIONS)
"""Names of the spans of a step that are no actions of its schedule."""
MOST_SHARES = 1000
"""Of how many of the last steps it is known how long the rank computed and waited."""


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        what: An action of the schedule, or one of the names above.
        start: Seconds of the rank's own clock.
        end: Seconds of the rank's own clock.
    """

    what: Action | str
    start: float
    end: float


@dataclass
class StepRecord:
    """One training step of one rank.

    Attributes:
        number: Number of the step since recording began, from 0.
        start: Seconds of the rank's own clock.
        end: Seconds of the rank's own clock; `start` until the step has ended.
        schedule: The schedule that it ran, with its messages.
        rows: Samples of the batch.
        spans: What the rank did, in order; a receive is the wait for its message.
    """

    number: int
    start: float
    end: float
    schedule: Schedule | None = None
    rows: int = 0
    spans: list[Span] = field(default_factory=list)

    def seconds(self) -> tuple[float, float]:
        """Returns how long the rank computed in this step, and how long it waited."""
        busy = wait = 0.0
        for what, start, end in self.spans:
            if is_busy(what):
                busy += end - start
            elif is_wait(what):
                wait += end - start
        return busy, wait


class Shares(NamedTuple):
    """How a rank spends its time, in parts of it.

    Attributes:
        busy: Computing: forward and backward passes and the update of the weights.
        wait: Waiting for messages.
    """

    busy: float
    wait: float


class Recorder:
    """Notes what this rank does in its training steps.

    Of every step it keeps how long the rank computed and waited, of some all that happened.
    """

    def __init__(self, steps: int | range) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int | range) or not _some(steps):
            raise ConfigurationError(
                "Expected how many of the last steps to keep, or a range of their numbers such as "
                f"range(10, 15). Received: steps={steps!r}"
            )
        self._numbers = None if isinstance(steps, int) else steps
        self._kept: deque[StepRecord] = deque(maxlen=steps if isinstance(steps, int) else None)
        self._count = 0
        self._begun: deque[tuple[float, float, float, float]] = deque(maxlen=MOST_SHARES)
        self.spans: MutableSequence[Span] = deque(maxlen=0)
        self._current = StepRecord(0, 0.0, 0.0)

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that are kept, in order."""
        return list(self._kept)

    @property
    def last(self) -> StepRecord:
        """The step that was recorded last, kept or not."""
        return self._current

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Records one step; a step that fails is not kept."""
        start = time.perf_counter()
        self._current = step = StepRecord(self._count, start, start)
        self.spans = step.spans
        try:
            yield
        finally:
            self.spans = deque(maxlen=0)  # evaluation and prediction are not recorded
        step.end = time.perf_counter()
        self._count += 1
        self._begun.append((step.start, step.end, *step.seconds()))
        if self._numbers is None or step.number in self._numbers:
            self._kept.append(step)

    def runs(self, schedule: Schedule, rows: int) -> None:
        """Notes what the current step runs."""
        self._current.schedule = schedule
        self._current.rows = rows

    @contextlib.contextmanager
    def span(self, what: Action | str) -> Iterator[None]:
        """Records one span."""
        start = time.perf_counter()
        yield
        self.spans.append(Span(what, start, time.perf_counter()))

    def take_shares(self) -> Shares:
        """Returns how this rank spent its time since the last call, by the median of its steps.

        Of the last thousand, if there were more. A step lasts until the next one begins, the last
        one until its own end. The median leaves out the steps in which TensorFlow traces its
        functions.
        """
        steps = list(self._begun)
        self._begun.clear()
        if not steps:
            return Shares(0.0, 0.0)
        ends = [*(step[0] for step in steps[1:]), steps[-1][1]]
        shares = [
            (busy / (end - start), wait / (end - start))
            for (start, _, busy, wait), end in zip(steps, ends, strict=True)
        ]
        return Shares(median(b for b, _ in shares), median(w for _, w in shares))


def is_busy(what: Action | str) -> bool:
    """Whether a rank computes meanwhile."""
    if isinstance(what, str):
        return what in (UPDATE, METRICS)
    return isinstance(what, Compute | Reduce)


def is_wait(what: Action | str) -> bool:
    """Whether a rank waits for a message meanwhile."""
    if isinstance(what, str):
        return what in (TIES, REDUCTIONS)
    return isinstance(what, Transfer) and what.operation == "R"


def _some(steps: int | range) -> bool:
    return steps > 0 if isinstance(steps, int) else len(steps) > 0 and steps[0] >= 0
