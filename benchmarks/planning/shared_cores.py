"""The step of a plan whose ranks share fewer cores: a rank that waits leaves its core to others."""

from __future__ import annotations

from collections.abc import Iterator

from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.schedule import Compute, ScheduleSpec


def shared_step_seconds(simulation: PlanSimulation, cores: int) -> float:
    """Plays a step of ranks of one stage each, on a machine measured with all of them at once.

    The simulator of the library knows no cores: it lets each rank compute as it was measured. Here
    ranks that compute share the cores, so that the fewer they are, the faster they go on. Messages
    take no time.

    Args:
        simulation: A plan on a machine.
        cores: Cores of all ranks.
    """
    plan, costs = simulation.plan, simulation.costs().stages
    spec = ScheduleSpec.of(simulation.schedule, plan.num_stages)
    made = spec.make(simulation.micro_batches).actions
    programs = [[one for one in own if isinstance(one, Compute)] for own in made]
    left = [[costs[one.stage].seconds(one.kind) for one in own] for own in programs]
    done: set[Compute] = set()
    measured_share, seconds = min(1.0, cores / len(programs)), 0.0

    def needed(one: Compute) -> Iterator[Compute]:
        forward = one.kind == "F"
        for source, target in plan.links if forward else plan.gradient_links:
            if forward and target == one.stage:
                yield one._replace(stage=source)
            if not forward and source == one.stage:
                yield one._replace(stage=target)

    while any(programs):
        running = [r for r, own in enumerate(programs) if own and done.issuperset(needed(own[0]))]
        speed = min(1.0, cores / len(running)) / measured_share
        span = min(left[rank][0] for rank in running) / speed
        seconds += span
        for rank in running:
            left[rank][0] -= span * speed
            if left[rank][0] <= 1e-12:
                done.add(programs[rank].pop(0))
                left[rank].pop(0)
    return seconds
