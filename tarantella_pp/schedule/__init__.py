"""Pipeline schedules as data: generate, lower to messages, validate; then run, simulate or draw.

    from tarantella_pp.schedule import Costs, lower, make_schedule, simulate, validate

    schedule = lower(make_schedule("1f1b", num_stages=4, num_micro_batches=8))
    validate(schedule)
    print(schedule.to_text())
    print(simulate(schedule, Costs.uniform(num_stages=4)).to_text())

The list of actions that is validated and drawn is the one that runs.
"""

from __future__ import annotations

from tarantella_pp.schedule.generators import SCHEDULE_NAMES as SCHEDULE_NAMES
from tarantella_pp.schedule.generators import V_SHAPED as V_SHAPED
from tarantella_pp.schedule.generators import make_schedule as make_schedule
from tarantella_pp.schedule.lowering import lower as lower
from tarantella_pp.schedule.lowering import reductions as reductions
from tarantella_pp.schedule.lowering import validate as validate
from tarantella_pp.schedule.schedule import Action as Action
from tarantella_pp.schedule.schedule import Compute as Compute
from tarantella_pp.schedule.schedule import Direction as Direction
from tarantella_pp.schedule.schedule import HeldAgain as HeldAgain
from tarantella_pp.schedule.schedule import Kind as Kind
from tarantella_pp.schedule.schedule import Link as Link
from tarantella_pp.schedule.schedule import Message as Message
from tarantella_pp.schedule.schedule import Operation as Operation
from tarantella_pp.schedule.schedule import Reduce as Reduce
from tarantella_pp.schedule.schedule import Schedule as Schedule
from tarantella_pp.schedule.schedule import Transfer as Transfer
from tarantella_pp.schedule.schedule import parse_action as parse_action
from tarantella_pp.schedule.schedule_search import search_schedule as search_schedule
from tarantella_pp.schedule.simulator import Costs as Costs
from tarantella_pp.schedule.simulator import Event as Event
from tarantella_pp.schedule.simulator import LinkCosts as LinkCosts
from tarantella_pp.schedule.simulator import StageCosts as StageCosts
from tarantella_pp.schedule.simulator import StepTimeline as StepTimeline
from tarantella_pp.schedule.simulator import simulate as simulate
from tarantella_pp.schedule.spec import BEFORE_SEARCH as BEFORE_SEARCH
from tarantella_pp.schedule.spec import SEARCHED as SEARCHED
from tarantella_pp.schedule.spec import TRAINING_NAMES as TRAINING_NAMES
from tarantella_pp.schedule.spec import ScheduleSpec as ScheduleSpec
from tarantella_pp.schedule.spec import read_schedule as read_schedule
from tarantella_pp.schedule.spec import send_window as send_window
