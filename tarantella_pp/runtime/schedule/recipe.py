"""Which schedule a pipeline runs, whatever the number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tarantella_pp.errors import ScheduleError
from tarantella_pp.runtime.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from tarantella_pp.runtime.schedule.lowering import lower
from tarantella_pp.runtime.schedule.placement import make_placement
from tarantella_pp.runtime.schedule.schedule import Schedule
from tarantella_pp.runtime.schedule.serial import on_one_rank

TRAINING_NAMES = tuple(name for name in SCHEDULE_NAMES if name != "forward")
"""The named schedules that train."""
SEARCHED = "zb-auto"
"""The schedule that is searched for with measured costs, and that is `BEFORE_SEARCH` till then."""
BEFORE_SEARCH = "zb-h1"


@dataclass(frozen=True)
class Recipe:
    """Makes the schedules of one pipeline.

    Attributes:
        name: Name of the schedule.
        num_stages: Number of pipeline stages.
        num_ranks: Number of ranks.
        own: The schedule itself where it is none of the named ones: the user's, or a found one.
    """

    name: str
    num_stages: int
    num_ranks: int
    own: Schedule | None = None

    @classmethod
    def of(cls, schedule: Any, num_stages: int, num_ranks: int) -> Recipe:
        """Reads what a user gave as `schedule`.

        Args:
            schedule: Name of a schedule, a `Schedule`, or the path of a text file with one.
            num_stages: Number of pipeline stages.
            num_ranks: Number of ranks.

        Returns:
            The recipe.

        Raises:
            ScheduleError: If there is no such schedule, it does not train, or it is not one for
                so many stages and ranks.
        """
        own = read_schedule(schedule)
        if own is not None:
            return cls.found(own, num_stages, num_ranks)
        recipe = cls(schedule, num_stages, num_ranks)
        recipe.placement  # noqa: B018 - refuses ranks that do not fit
        return recipe

    @classmethod
    def found(cls, own: Schedule, num_stages: int, num_ranks: int) -> Recipe:
        """Makes the recipe of one schedule.

        Args:
            own: The schedule, computations only.
            num_stages: Number of pipeline stages.
            num_ranks: Number of ranks: those of the schedule, or 1.

        Returns:
            The recipe.

        Raises:
            ScheduleError: If the schedule is not one for so many stages and ranks.
        """
        if own.num_stages != num_stages or num_ranks not in (1, own.num_ranks):
            raise ScheduleError(
                f"The schedule '{own.name}' is one of {own.num_stages} stages on {own.num_ranks} "
                f"ranks. Received: num_stages={num_stages} on {num_ranks} ranks"
            )
        if own.num_ranks != num_ranks:
            own = on_one_rank(own)
        return cls(own.name, num_stages, num_ranks, own)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage.

        Raises:
            ScheduleError: If the schedule does not work with so many ranks.
        """
        if self.own is not None:
            return self.own.placement
        if self.num_ranks == 1:
            return (0,) * self.num_stages
        twice = self.num_stages == 2 * self.num_ranks
        v_shaped = self.name == "zb-v" or (self.name == SEARCHED and twice)
        return make_placement(self.num_stages, self.num_ranks, None, v_shaped=v_shaped)

    def make(self, num_micro_batches: int) -> Schedule:
        """Makes the schedule of a step, computations only.

        Args:
            num_micro_batches: Number of micro-batches; a schedule of the user's leaves out those
                that are missing.

        Raises:
            ScheduleError: If it has fewer.
        """
        if self.own is not None:
            return self.own.first(num_micro_batches)
        name = BEFORE_SEARCH if self.name == SEARCHED else self.name
        if name == "zb-v" and self.num_ranks == 1:
            return on_one_rank(make_schedule(name, self.num_stages, num_micro_batches))
        made = make_schedule(
            name, self.num_stages, num_micro_batches, self.num_ranks, placement=self.placement
        )
        return replace(made, name=self.name)

    def in_flight(self, num_micro_batches: int) -> tuple[int, ...]:
        """Returns the most micro-batches that each stage holds.

        Args:
            num_micro_batches: Number of micro-batches of a step.
        """
        made = self.make(num_micro_batches)
        return tuple(made.in_flight(stage) for stage in range(self.num_stages))


def read_schedule(schedule: Any) -> Schedule | None:
    """Reads a schedule that is none of the named ones.

    Args:
        schedule: Name of a schedule, a `Schedule`, or the path of a text file with one.

    Returns:
        The schedule, computations only; `None` for a name.

    Raises:
        ScheduleError: If it is none of these, has messages already, or does not train.
    """
    if isinstance(schedule, str) and schedule in TRAINING_NAMES:
        return None
    if isinstance(schedule, str | Path) and Path(schedule).is_file():
        schedule = Schedule.from_text(_text_of(Path(schedule)))
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"Expected one of {TRAINING_NAMES}, a Schedule, or the path of a text file with one. "
            f"Received: schedule={schedule!r}"
        )
    if schedule.is_lowered:
        raise ScheduleError(
            f"The schedule '{schedule.name}' has messages; give its computations alone, for "
            "messages are added according to the model."
        )
    if not schedule.has_backward:
        raise ScheduleError(f"The schedule '{schedule.name}' has forward passes only.")
    lower(schedule)  # refuses what is incomplete or deadlocks
    named = schedule.name in SCHEDULE_NAMES
    return replace(schedule, name=f"{schedule.name}-edited") if named else schedule


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ScheduleError(f"Cannot read the schedule '{path}': {error}") from error
