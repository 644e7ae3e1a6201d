"""Pipeline schedules as data: generate, lower to messages, validate; then run, simulate or draw.

    from tarantella_pp.schedule import lower, make_schedule, validate

    schedule = lower(make_schedule("1f1b", num_stages=4, num_micro_batches=8))
    validate(schedule)
    print(schedule.to_text())

The list of actions that is validated and drawn is the one that runs.
"""

from __future__ import annotations

from tarantella_pp.schedule.actions import (
    Action,
    Compute,
    Direction,
    Kind,
    Link,
    Message,
    Operation,
    Reduce,
    Transfer,
    kept_whole,
    parse_action,
)
from tarantella_pp.schedule.generators import SCHEDULE_NAMES, Backward, make_schedule
from tarantella_pp.schedule.lowering import lower, validate
from tarantella_pp.schedule.replay import reductions
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.schedule.spec import (
    BEFORE_SEARCH,
    SEARCHED,
    TRAINING_NAMES,
    ScheduleSpec,
    bubble_fraction,
    held_whole_bounds,
    in_flight_bounds,
    read_schedule,
    send_window,
)

__all__ = [
    "BEFORE_SEARCH",
    "SCHEDULE_NAMES",
    "SEARCHED",
    "TRAINING_NAMES",
    "Action",
    "Backward",
    "Compute",
    "Direction",
    "Kind",
    "Link",
    "Message",
    "Operation",
    "Reduce",
    "Schedule",
    "ScheduleSpec",
    "Transfer",
    "bubble_fraction",
    "held_whole_bounds",
    "in_flight_bounds",
    "kept_whole",
    "lower",
    "make_schedule",
    "parse_action",
    "read_schedule",
    "reductions",
    "send_window",
    "validate",
]
