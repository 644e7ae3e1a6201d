"""Schedules played by the clock: step time, bubble and memory of a pipeline that need not be there.

from tarantella_pp.schedule import lower, make_schedule
from tarantella_pp.simulation import Costs, simulate

schedule = lower(make_schedule("1f1b", num_stages=4, num_micro_batches=8))
print(simulate(schedule, Costs.uniform(num_stages=4)).to_text())
"""

from __future__ import annotations

from tarantella_pp.simulation.pipelines import Network, PipelineStep, pipeline_step, replicated_step
from tarantella_pp.simulation.schedule_search import search_schedule
from tarantella_pp.simulation.simulator import (
    Costs,
    Event,
    LinkCosts,
    StageCosts,
    StepTimeline,
    simulate,
)

__all__ = [
    "Costs",
    "Event",
    "LinkCosts",
    "Network",
    "PipelineStep",
    "StageCosts",
    "StepTimeline",
    "pipeline_step",
    "replicated_step",
    "search_schedule",
    "simulate",
]
