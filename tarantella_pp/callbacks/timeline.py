"""`Timeline`: records what every rank does in training, and when."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from tarantella_pp.callbacks.timeline_summary import summary_table
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.guard.launch_environment import TRACE_VARIABLE
from tarantella_pp.runtime.tracing.chrome_trace import write_trace
from tarantella_pp.runtime.tracing.clock_sync import clock_offset
from tarantella_pp.runtime.tracing.measured_costs import alike, simulated
from tarantella_pp.runtime.tracing.recorded_step import RecordedStep, gather_steps
from tarantella_pp.runtime.tracing.recorder import Recorder

_TRACED = itertools.count(1)
_LOG = logging.getLogger(__name__)


class Timeline(keras.callbacks.Callback):
    """Records what every rank of a pipeline does, and writes it as a trace.

    At the end of training one file has the forward and backward passes, sends and waits of all
    ranks, on one clock, with an arrow from each send to its receive. Open it at
    https://ui.perfetto.dev or in chrome://tracing. Below the ranks it has them once more as the
    simulator predicts them from the median times of what was recorded.

    At the end of each epoch the logs get how ranks spent their time, on average: `busy` is the
    part in which they compute, `wait` that in which they wait for messages, and `bubble` all in
    which they do not compute. `memory` is the most that a rank has taken by now, in MiB, and
    `memory_planned` what was planned for it; see `print(model.plan)`. Recording takes one or two
    microseconds for each pass and message.

    Every rank must have the callback. Steps are counted from 0 over all epochs.

    Args:
        path: The file, in Chrome's trace format. Default: none is written.
        steps: The steps in the file: so many last ones, or a range of their numbers such as
            `range(10, 15)`.

    Raises:
        ConfigurationError: If `steps` names no step.

    Example:
        ```python
        timeline = tnt.callbacks.Timeline("trace.json")
        model.fit(x, y, callbacks=[timeline])
        timeline.summary()
        ```
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, steps: int | range = 10) -> None:
        super().__init__()
        self._path = None if path is None else Path(path).absolute()
        self._wanted = steps
        self._recorder = Recorder(steps)
        self._steps: tuple[RecordedStep, ...] = ()

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """The recorded steps, on every rank; empty until training has ended."""
        return self._steps

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Begins to record.

        Args:
            logs: Not used.

        Raises:
            ConfigurationError: If the model is no pipeline.
        """
        self._recorder = Recorder(self._wanted)
        self._steps = ()
        self._engine().record(self._recorder)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        """Adds to the logs how time was spent and memory taken; all ranks come here together.

        Args:
            epoch: Not used.
            logs: The logs of the epoch.
        """
        ranks = self._engine().groups.pipeline.allgather_json(list(self._recorder.take_shares()))
        busy, wait = (sum(part) / len(ranks) for part in zip(*ranks, strict=True))
        memory = self._engine().watch.measure()
        if logs is not None:
            logs.update(bubble=1.0 - busy, busy=busy, wait=wait)
            if memory:
                most = max(memory, key=lambda rank: rank.measured.bytes)
                logs.update(memory=most.measured.bytes / 2**20, memory_planned=most.planned / 2**20)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Ends recording and writes the file; all ranks come here together.

        Args:
            logs: Not used.
        """
        engine = self._engine()
        engine.record(None)
        offset = clock_offset(engine.groups.pipeline)
        self._steps = gather_steps(self._recorder.steps, offset, engine.groups.pipeline)
        if self._path is not None and engine.prints:
            same = alike(self._steps)
            simulation = (simulated(same), same[-1].origin) if same else None
            write_trace(self._path, self._steps, simulation)

    def summary(self) -> None:
        """Prints where each rank's time went, and how it compares with the simulator's.

        Raises:
            ConfigurationError: If nothing was recorded.
        """
        same = alike(self._steps)
        if not same:
            raise ConfigurationError(
                "No steps were recorded: a Timeline has a summary once `fit` has ended, if it had "
                f"the steps that were asked for. Received: steps={self._wanted!r}"
            )
        Console().print(summary_table(same, simulated(same)))

    def _engine(self) -> Any:
        engine = getattr(self.model, "_engine", None)
        if engine is None:
            raise ConfigurationError(
                "Timeline records the ranks of a tnt.PipelineModel. "
                f"Received: a model of class {type(self.model).__name__}"
            )
        return engine


def with_trace(callbacks: Any, model: Any, environ: Mapping[str, str]) -> Any:
    """Adds the callback that `tarantella --trace FILE` asks for."""
    path = Path(environ.get(TRACE_VARIABLE, ""))
    if not path.name:
        return callbacks
    if timelines_in(callbacks):
        _LOG.warning("--trace %s is left out: the script has a Timeline of its own", path)
        return callbacks
    number = next(_TRACED)
    timeline = Timeline(path if number == 1 else path.with_stem(f"{path.stem}-{number}"))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        timeline.set_model(model)
        callbacks.append(timeline)
        return callbacks
    return [*_listed(callbacks), timeline]


def timelines_in(callbacks: Any) -> int:
    """Returns how many of the callbacks record timelines, which must be so on all ranks."""
    return sum(isinstance(callback, Timeline) for callback in _listed(callbacks))


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
