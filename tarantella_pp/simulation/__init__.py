"""Schedules played by the clock: step time, bubble and memory of a pipeline that need not be there.

from tarantella_pp.schedule import lower, make_schedule
from tarantella_pp.simulation import Costs, simulate

schedule = lower(make_schedule("1f1b", num_stages=4, num_micro_batches=8))
print(simulate(schedule, Costs.uniform(num_stages=4)).to_text())
"""

from __future__ import annotations

from tarantella_pp.simulation.schedule_search import search_schedule as search_schedule
from tarantella_pp.simulation.simulator import Costs as Costs
from tarantella_pp.simulation.simulator import Event as Event
from tarantella_pp.simulation.simulator import LinkCosts as LinkCosts
from tarantella_pp.simulation.simulator import StageCosts as StageCosts
from tarantella_pp.simulation.simulator import StepTimeline as StepTimeline
from tarantella_pp.simulation.simulator import simulate as simulate
