"""Searches for the fastest schedule while a pipeline trains, with what its steps cost."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.machine import clock_offset
from tarantella_pp.runtime.recorder import (
    RecordedStep,
    StepRecord,
    gather_steps,
    measured_costs,
)
from tarantella_pp.schedule import Schedule, ScheduleSpec, make_schedule
from tarantella_pp.simulation import search_schedule

# Steps of each kind that are not measured, for TensorFlow compiles in them.
WARM_UP = 1
# Steps of each kind that are measured.
MEASURED = 4


class Autotune:
    """Searches for the fastest schedule while the pipeline trains.

    Some steps run with both gradients of a micro-batch in one, some with one after the other.
    Then rank 0 searches with the medians of what these cost, and all ranks go on with what it
    finds. All these steps train: gradients are summed in the same order in every schedule.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        num_micro_batches: int,
        in_flight_limit: Sequence[int],
        communicator: Communicator,
    ) -> None:
        self._wanted = spec
        self._num_micro_batches = num_micro_batches
        self._limit = tuple(in_flight_limit)
        self._communicator = communicator
        self._rows = 0
        self._steps: list[StepRecord] = []
        fused = make_schedule("1f1b", spec.num_stages, num_micro_batches, placement=spec.placement)
        self._trials = [self._spec_of(fused), spec]

    @property
    def spec(self) -> ScheduleSpec:
        """The spec of the next step."""
        return self._trials[len(self._steps) // (WARM_UP + MEASURED)]

    def learn(self, step: StepRecord) -> ScheduleSpec | None:
        """Takes notice of a step that has ended; all ranks must call this alike."""
        self._rows = self._rows or step.rows
        if step.rows != self._rows:
            return None  # the last batch of a data set is often smaller, and takes less time
        self._steps.append(step)
        if len(self._steps) < len(self._trials) * (WARM_UP + MEASURED):
            return None
        try:
            return self._found()
        except BaseException:
            self._steps.pop()  # measured and searched for again
            raise

    def _found(self) -> ScheduleSpec:
        ranks = self._communicator
        kept = [s for i, s in enumerate(self._steps) if i % (WARM_UP + MEASURED) >= WARM_UP]
        steps = gather_steps(kept, clock_offset(ranks), ranks)
        text = self._search(steps).to_text() if ranks.rank == 0 else None
        return self._spec_of(Schedule.from_text(ranks.broadcast_json(text, 0)))

    def _spec_of(self, schedule: Schedule) -> ScheduleSpec:
        return ScheduleSpec.of_custom(schedule, self._wanted.num_stages, self._wanted.num_ranks)

    def _search(self, steps: Sequence[RecordedStep]) -> Schedule:
        return search_schedule(
            self._wanted.num_stages, self._num_micro_batches, placement=self._wanted.placement,
            costs=measured_costs(steps), in_flight_limit=self._limit,
        )  # fmt: skip
