"""The loop over a rank's actions, with a clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tarantella_pp.runtime.exchange import Exchange
from tarantella_pp.runtime.execution import Execution, Step
from tarantella_pp.runtime.recording import METRICS, SUMS, UPDATE, Recorder, Span
from tarantella_pp.schedule import Compute, Transfer

if TYPE_CHECKING:
    import tensorflow as tf

    from tarantella_pp.runtime.stage import Stage


class RecordedExecution(Execution):
    """Notes when each action begins and ends.

    The loop itself is that of `Execution`, which so needs no checks whether to take notes. On a
    GPU a computation ends when it has been handed over, as far as these notes can tell.

    Args:
        stages: This rank's stages.
        exchange: Its messages.
        recorder: Where to note.
    """

    def __init__(self, stages: Mapping[int, Stage], exchange: Exchange, recorder: Recorder) -> None:
        super().__init__(stages, exchange)
        self._recorder = recorder
        self._waits_since = 0.0

    def _send(self, action: Transfer) -> None:
        start = time.perf_counter()
        super()._send(action)
        self._recorder.spans.append(Span(action, start, time.perf_counter()))

    def _receive(self, action: Transfer) -> Sequence[tf.Tensor]:
        self._waits_since = time.perf_counter()
        arrived = super()._receive(action)
        self._recorder.spans.append(Span(action, self._waits_since, time.perf_counter()))
        return arrived

    def _score_ahead(self) -> bool:
        return self._noted(METRICS, super()._score_ahead)

    def _keep_up_scores(self) -> bool:
        return self._noted(METRICS, super()._keep_up_scores)

    def _multiply_ahead(self) -> bool:
        return self._noted(SUMS, super()._multiply_ahead)

    def _update_ahead(self) -> bool:
        return self._noted(UPDATE, super()._update_ahead)

    def _keep_up(self, stage: Stage) -> bool:
        return self._noted(SUMS, functools.partial(super()._keep_up, stage))

    def _noted(self, name: str, work: Callable[[], bool]) -> bool:
        """Notes some work that is no action of the schedule, if there was any."""
        start = time.perf_counter()
        found = work()
        if found:
            self._waits_since = time.perf_counter()
            self._recorder.spans.append(Span(name, start, self._waits_since))
        return found

    def _perform(
        self, stage: Stage, action: Compute, arrived: Sequence[tf.Tensor], step: Step
    ) -> None:
        start = time.perf_counter()
        super()._perform(stage, action, arrived, step)
        self._recorder.spans.append(Span(action, start, time.perf_counter()))
