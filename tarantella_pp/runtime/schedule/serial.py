"""A schedule of several ranks, run by one."""

from __future__ import annotations

from dataclasses import replace

from tarantella_pp.runtime.schedule.actions import Compute
from tarantella_pp.runtime.schedule.costs import Costs
from tarantella_pp.runtime.schedule.lowering import lower
from tarantella_pp.runtime.schedule.schedule import Schedule
from tarantella_pp.runtime.schedule.simulator import simulate


def on_one_rank(schedule: Schedule) -> Schedule:
    """Puts all stages on one rank, which runs the computations in the order of their beginnings.

    Args:
        schedule: Computations only.

    Returns:
        The same computations on rank 0, in an order that they could have had on their own ranks.

    Raises:
        ScheduleError: If the order of the computations deadlocks.
    """
    timeline = simulate(lower(schedule), Costs.uniform(schedule.num_stages))
    computations = sorted(
        (event.start, event.end, event.rank, place, event.action)
        for own in timeline.events
        for place, event in enumerate(own)
        if isinstance(event.action, Compute)
    )
    order = tuple(action for *_, action in computations)
    placement = (0,) * schedule.num_stages
    return replace(schedule, num_ranks=1, placement=placement, actions=(order,))
