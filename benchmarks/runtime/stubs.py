"""A pipeline without layers: stages that sleep instead of computing and hand on what they get.

All else is the runtime itself: its loop over the actions, its messages, its schedules. Nothing
here loads TensorFlow, so that many ranks start at once on a small machine.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.executor import REDUCTIONS, Executor, Recorder
from tarantella_pp.runtime.stage.stage_boundary import (
    BoundaryTensor,
    StageBoundary,
    stage_boundaries,
    stage_edges,
)
from tarantella_pp.runtime.stage.stage_messages import StageMessages
from tarantella_pp.schedule import (
    SEARCHED,
    Costs,
    Schedule,
    lower,
    make_schedule,
    search_schedule,
    validate,
)

ROWS = 4
# Arrays stand for tensors.
PLAIN = SimpleNamespace(to_buffer=lambda x: x, to_tensor=lambda x: x)


@dataclass(frozen=True)
class Seconds:
    """How long a stage sleeps for each kind of computation."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def total(self) -> float:
        """For one micro-batch."""
        return self.forward + self.input_gradient + self.weight_gradient


class SleepingStage:
    """A stage as the runtime's loop knows it; see `runtime.stage.Stage` for the methods."""

    def __init__(self, boundary: StageBoundary, seconds: Seconds) -> None:
        self.boundary = boundary
        self._seconds = seconds
        self._kept: dict[int, Any] = {}

    def forward(
        self, key: int, inputs: Sequence[Any], share: float = 1.0, *, whole: bool = False
    ) -> tuple[list[Any], None]:
        self._kept[key] = inputs[0]
        return self.evaluate(inputs, share)

    def evaluate(
        self, inputs: Sequence[Any], share: float = 1.0, predicts: bool = False
    ) -> tuple[list[Any], None]:
        _SLEEPER.sleep(self._seconds.forward)
        return [inputs[0] for _ in self.boundary.outputs], None

    def backward(self, key: int, seeds: Sequence[Any]) -> list[Any]:
        found = self.backward_input(key, seeds)
        self.backward_weight(key)
        return found

    def backward_input(self, key: int, seeds: Sequence[Any]) -> list[Any]:
        _SLEEPER.sleep(self._seconds.input_gradient)
        return [seeds[1] for _ in self.boundary.input_gradients]

    def backward_weight(self, key: int) -> None:
        _SLEEPER.sleep(self._seconds.weight_gradient)
        del self._kept[key]


class StubSums:
    """Gradients of a stage that are added up over replicas.

    Args:
        peers: The ranks with the same stage.
        nbytes: Bytes of float32 gradients of a stage.
    """

    def __init__(self, peers: Communicator, nbytes: int) -> None:
        self.peers = peers
        self._array = np.ones(nbytes // 4, np.float32)
        self._open: list[Any] = []

    def start(self) -> None:
        """Starts to add up; never waits."""
        self._open.append(self.peers.start_allreduce(self._array))

    def finish(self) -> None:
        """Waits for all sums."""
        while self._open:
            self._open.pop(0).wait()


class StubStep:
    """Data and loss of a step, all of them one array; see `runtime/stage/step.py`."""

    def __init__(
        self,
        training: bool,
        sizes: Sequence[int],
        array: np.ndarray,
        results: Sequence[BoundaryTensor],
        sums: StubSums | None = None,
    ) -> None:
        self.training, self.predicts = training, not training
        self.sizes = sizes
        self._sums = sums
        self.finished: list[int] = []
        self._array = array
        self._gradients = dict.fromkeys(results, array)

    def data(self, stage: int, micro_batch: int) -> Sequence[Any]:
        return [self._array] if stage == 0 else []

    def share(self, micro_batch: int) -> float:
        return 1.0

    def added_factors(self, stage: int, micro_batch: int) -> Any:
        return 1.0

    def add(self, *_: Any) -> None:
        """Stages without layers add no losses."""

    def finish(self, micro_batch: int, results: Sequence[Any]) -> None:
        self.finished.append(micro_batch)

    def forwards_done(self) -> None:
        """Nobody waits for this."""

    def reduce(self, stage: int, bucket: int) -> None:
        if self._sums is not None:
            self._sums.start()

    def loss_gradients(self, micro_batch: int) -> Mapping[BoundaryTensor, Any]:
        return self._gradients


class StubPipeline:
    """One rank's part of a pipeline without layers.

    Args:
        name: Name of the schedule.
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.
        seconds: How long each stage sleeps.
        communicator: The ranks.
        width: Elements of a row; a message has `ROWS` rows of float32.
        recorder: Where to note what happens, if anywhere.
        sums: The gradients of each stage that replicas add up; `None` for one pipeline.
    """

    def __init__(
        self,
        name: str,
        num_stages: int,
        num_micro_batches: int,
        seconds: Seconds,
        communicator: Communicator,
        width: int = 128,
        recorder: Recorder | None = None,
        sums: StubSums | None = None,
    ) -> None:
        graph = chain(num_stages, width)
        boundaries = stage_boundaries(graph, range(num_stages), num_stages)
        size = (num_stages, num_micro_batches, communicator.size)
        if name == SEARCHED:
            parts = (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
            plain = search_schedule(*size, costs=Costs.uniform(num_stages, *parts))
        else:
            plain = make_schedule(name, *size)
        buckets = () if sums is None else [1] * num_stages
        self.schedule: Schedule = lower(plain, buckets=buckets)
        self._sums = sums
        validate(self.schedule)
        own = self.schedule.stages_of(communicator.rank)
        stages: Any = {stage: SleepingStage(boundaries[stage], seconds) for stage in own}
        messages = StageMessages(
            communicator,
            graph,
            stage_edges(boundaries),
            self.schedule.placement,
            conversion=PLAIN,
        )
        self._recorder = recorder or Recorder(1)
        self._results = boundaries[-1].model_outputs
        self._array = np.zeros((ROWS, width), np.float32)
        self._execution = Executor(stages, messages, self._recorder)

    def step(self) -> StubStep:
        """Runs one step."""
        sizes = [ROWS] * self.schedule.num_micro_batches
        step = StubStep(self.schedule.has_backward, sizes, self._array, self._results, self._sums)
        with self._recorder.step(self.schedule, sum(sizes)):
            self._execution.run(self.schedule, step)
            if self._sums is not None:
                with self._recorder.span(REDUCTIONS):
                    self._sums.finish()
        return step


def chain(num_stages: int, width: int) -> LayerGraph:
    """A graph of one node for each stage, one after the other."""
    nodes = tuple(
        Node(i, f"node_{i}", "Stub", inputs=(i,), outputs=(i + 1,)) for i in range(num_stages)
    )
    tensors = tuple(
        Tensor(
            i,
            f"tensor_{i}",
            (None, width),
            "float32",
            producer=None if i == 0 else i - 1,
            consumers=(i,) if i < num_stages else (),
            bytes_per_sample=4 * width,
            has_gradient=i > 0,
        )
        for i in range(num_stages + 1)
    )
    return LayerGraph(nodes, tensors, (0,), (num_stages,))


class _Sleeper:
    """Sleeps as long as it should, on the whole: the system wakes everybody up a little late."""

    def __init__(self) -> None:
        self._late: deque[float] = deque([0.0], maxlen=15)

    def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        start = time.perf_counter()
        wanted = max(0.0, seconds - statistics.median(self._late))
        time.sleep(wanted)
        self._late.append(time.perf_counter() - start - wanted)


_SLEEPER = _Sleeper()
