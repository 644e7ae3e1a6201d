"""Pipeline schedules as data: generate, lower to messages, validate, then run, simulate or draw.

The list of actions that is validated and drawn is the one that runs.
"""

from __future__ import annotations

from tarantella_pp.runtime.schedule.actions import (
    Action,
    Compute,
    Direction,
    Kind,
    Link,
    Message,
    Operation,
    Transfer,
    parse_action,
)
from tarantella_pp.runtime.schedule.catalogue import SCHEDULE_NAMES, Backward, make_schedule
from tarantella_pp.runtime.schedule.closed_forms import (
    bubble_fraction,
    in_flight_bounds,
    speed_up_bound,
)
from tarantella_pp.runtime.schedule.costs import Costs, LinkCosts, StageCosts
from tarantella_pp.runtime.schedule.lowering import lower
from tarantella_pp.runtime.schedule.recipe import (
    BEFORE_SEARCH,
    SEARCHED,
    TRAINING_NAMES,
    Recipe,
    read_schedule,
)
from tarantella_pp.runtime.schedule.schedule import Schedule
from tarantella_pp.runtime.schedule.simulator import simulate
from tarantella_pp.runtime.schedule.timeline import Event, Timeline
from tarantella_pp.runtime.schedule.validator import validate

__all__ = [
    "BEFORE_SEARCH",
    "SCHEDULE_NAMES",
    "SEARCHED",
    "TRAINING_NAMES",
    "Action",
    "Backward",
    "Compute",
    "Costs",
    "Direction",
    "Event",
    "Kind",
    "Link",
    "LinkCosts",
    "Message",
    "Operation",
    "Recipe",
    "Schedule",
    "StageCosts",
    "Timeline",
    "Transfer",
    "bubble_fraction",
    "in_flight_bounds",
    "lower",
    "make_schedule",
    "parse_action",
    "read_schedule",
    "simulate",
    "speed_up_bound",
    "validate",
]
