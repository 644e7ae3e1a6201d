"""Which schedule a pipeline runs, whatever the number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.generators import (
    SCHEDULE_NAMES,
    V_SHAPED,
    make_placement,
    make_schedule,
)
from tarantella_pp.schedule.lowering import lower, validate
from tarantella_pp.schedule.players import merge
from tarantella_pp.schedule.schedule import HeldAgain, Schedule


def send_window(name: str, num_stages: int, num_ranks: int) -> int | None:
    """Returns how many activations a stage may have sent to another that has not taken them."""
    # Where all forwards come first a stage could run ahead by a whole step, and keep all of it. It
    # waits instead, which costs nothing as long as the slowest stage never runs dry. A link that
    # skips stages is as many micro-batches behind as it skips; two more make up for unsteady times.
    # The wait ends when the receive is posted: what gets through if sends block, does so here.
    return num_stages + 2 if name in ("gpipe", "forward") and num_ranks == num_stages else None


# The schedule that is searched for with measured costs, and that is `BEFORE_SEARCH` till then.
SEARCHED = "zb-auto"
BEFORE_SEARCH = "zb-h1"
# The named schedules that train.
TRAINING_NAMES = (*(name for name in SCHEDULE_NAMES if name != "forward"), SEARCHED)


@dataclass(frozen=True)
class ScheduleSpec:
    """Which schedule one pipeline runs, for any number of micro-batches."""

    name: str
    placement: tuple[int, ...]  # the rank of each stage
    # The schedule itself where it is none of the named ones: the user's, or a found one
    custom: Schedule | None = None
    # Stage and micro-batch of each R of a named schedule
    repeated: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, schedule: Any, num_stages: int, num_ranks: int | None = None) -> ScheduleSpec:
        """Reads what a user gave as `schedule`."""
        if (custom := read_schedule(schedule)) is not None:
            return cls.of_custom(custom, num_stages, num_ranks)
        if num_ranks == 1:
            return cls(schedule, (0,) * num_stages)
        twice = num_ranks is not None and num_stages == 2 * num_ranks
        v_shaped = schedule in V_SHAPED or (schedule == SEARCHED and twice)
        return cls(schedule, make_placement(num_stages, num_ranks, None, v_shaped=v_shaped))

    @classmethod
    def of_custom(
        cls, custom: Schedule, num_stages: int, num_ranks: int | None = None
    ) -> ScheduleSpec:
        """Makes the spec of one schedule."""
        num_ranks = custom.num_ranks if num_ranks is None else num_ranks
        if custom.num_stages != num_stages or num_ranks not in (1, custom.num_ranks):
            raise ScheduleError(
                f"The schedule '{custom.name}' is one of {custom.num_stages} stages on "
                f"{custom.num_ranks} ranks. Received: num_stages={num_stages} on {num_ranks} ranks"
            )
        if custom.num_ranks != num_ranks:
            custom = on_one_rank(custom)
        return cls(custom.name, custom.placement, custom)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Ranks that it runs on."""
        return 1 + max(self.placement)

    def make(self, num_micro_batches: int) -> Schedule:
        """Makes the schedule of a step, computations only."""
        if self.custom is not None:
            return self.custom.first(num_micro_batches)
        return _named_schedule(self, num_micro_batches)

    @property
    def named(self) -> str:
        """The named schedule that runs; for one that is searched for, the one till then."""
        return BEFORE_SEARCH if self.name == SEARCHED else self.name

    def held_again(self, num_micro_batches: int) -> tuple[HeldAgain, ...]:
        """Returns for how many micro-batches stages hold what they repeated, at the most."""
        if self.custom is None and self.name == SEARCHED:
            return tuple(HeldAgain(n, True) for n in self.make(num_micro_batches).held)
        return self.make(num_micro_batches).held_again()


@lru_cache(maxsize=32)
def _named_schedule(spec: ScheduleSpec, num_micro_batches: int) -> Schedule:
    """Makes a named schedule, once for those who ask one after the other what it holds."""
    name, num_stages = spec.named, spec.num_stages
    if name in V_SHAPED and spec.num_ranks == 1:
        schedule = on_one_rank(make_schedule(name, num_stages, num_micro_batches))
    else:
        schedule = make_schedule(name, num_stages, num_micro_batches, placement=spec.placement)
    return replace(schedule.repeating(spec.repeated), name=spec.name)


def on_one_rank(schedule: Schedule) -> Schedule:
    """Puts all stages on one rank; each keeps its order."""
    placement = (0,) * schedule.num_stages
    orders = [[a for a in schedule.computations() if a.stage == s] for s in range(len(placement))]
    actions = merge(orders, placement, schedule.num_micro_batches)
    return replace(schedule, num_ranks=1, placement=placement, actions=actions)


def check_trains(schedule: Schedule, *links: Any) -> None:
    """Refuses a schedule with which a pipeline cannot train, over links and gradient links."""
    if not schedule.has_backward:
        raise ScheduleError(f"The schedule '{schedule.name}' has forward passes only.")
    validate(lower(schedule, *links))


def read_schedule(schedule: Any) -> Schedule | None:
    """Reads a schedule that is none of the named ones."""
    if isinstance(schedule, str) and schedule in TRAINING_NAMES:
        return None
    if isinstance(schedule, str | Path) and Path(schedule).is_file():
        try:
            text = Path(schedule).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise ScheduleError(f"Cannot read the schedule '{schedule}': {error}") from error
        schedule = Schedule.from_text(text)
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
    check_trains(schedule)
    named = schedule.name in (*SCHEDULE_NAMES, SEARCHED)
    return replace(schedule, name=f"{schedule.name}-edited") if named else schedule
