"""The best schedule for given costs and memory, among many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from tarantella_pp.errors import ScheduleError
from tarantella_pp.runtime.schedule.actions import Action, Compute
from tarantella_pp.runtime.schedule.costs import Costs
from tarantella_pp.runtime.schedule.greedy import GreedyPlayer, Policy
from tarantella_pp.runtime.schedule.lowering import lower
from tarantella_pp.runtime.schedule.schedule import Schedule
from tarantella_pp.runtime.schedule.simulator import simulate

_FINALISTS = 4


def search(
    candidates: Iterable[Schedule], costs: Costs, limits: int | Sequence[int] | None
) -> Schedule:
    """Finds the schedule of the shortest simulated step within a memory limit.

    The heuristic search of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1,
    played with the costs at hand: how many forwards the stages run ahead, whether weight
    gradients fill gaps that are too small for them, and what comes first otherwise, are tried in
    all combinations; the best of them and the candidates are simulated. Finally weight gradients
    are run together with their input gradients on those ranks where that is faster.

    Args:
        candidates: Known schedules, at least one; they say how many stages, micro-batches and
            ranks there are, and the result is never worse than those within the limit.
        costs: Seconds of stages and messages.
        limits: The most micro-batches that each stage may hold; None for no limit.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If the limits or the costs do not fit the stages.
    """
    known = list(candidates)
    model = known[0]
    if len(costs.stages) != model.num_stages:
        raise ScheduleError(
            f"Expected costs of {model.num_stages} stages. Received: {len(costs.stages)}"
        )
    bounds = _check_limits(limits, model)
    played = []
    for policy in _policies(model.num_stages, model.num_micro_batches, bounds):
        player = GreedyPlayer(model.placement, model.num_micro_batches, costs, policy)
        played.append((player.play(), tuple(map(tuple, player.actions))))
    played.sort(key=lambda outcome: outcome[0])
    finalists = [
        schedule
        for schedule in known
        if all(schedule.in_flight(stage) <= bound for stage, bound in enumerate(bounds))
    ]
    finalists += [replace(model, actions=actions) for _, actions in played[:_FINALISTS]]
    best = min(finalists, key=lambda schedule: _step_seconds(schedule, costs))
    return _fuse(best, costs)


def _check_limits(limits: int | Sequence[int] | None, model: Schedule) -> tuple[int, ...]:
    """Returns the limit of each stage."""
    if limits is None:
        limits = model.num_micro_batches
    bounds = (limits,) * model.num_stages if isinstance(limits, int) else tuple(limits)
    if len(bounds) != model.num_stages or min(bounds) < 1:
        raise ScheduleError(
            f"Expected at least 1 micro-batch for each of the {model.num_stages} stages. "
            f"Received: in_flight_limit={limits}"
        )
    return bounds


def _policies(num_stages: int, num_micro_batches: int, bounds: Sequence[int]) -> Iterator[Policy]:
    """Yields the policies to be tried, each once."""
    limits = tuple(min(bound, num_micro_batches) for bound in bounds)
    left = [num_stages - stage for stage in range(num_stages)]
    warm_ups = {
        tuple(min(limit, stages) for limit, stages in zip(limits, left, strict=True)),
        tuple(min(limit, 2 * stages - 1) for limit, stages in zip(limits, left, strict=True)),
        limits,
    }
    for ahead, fused, forward_first, deepest_first, patience in product(
        sorted(warm_ups), (False, True), (False, True), (False, True), (0.0, 0.5, 1.0)
    ):
        if not (fused and patience):
            yield Policy(limits, ahead, fused, forward_first, deepest_first, patience)


def _step_seconds(schedule: Schedule, costs: Costs) -> float:
    """Returns the simulated seconds of a step."""
    return simulate(lower(schedule), costs).step_seconds


def _fuse(schedule: Schedule, costs: Costs) -> Schedule:
    """Runs W together with the B just before it on each rank where the step gets shorter."""
    if all(
        stage.seconds("BW") >= stage.seconds("B") + stage.seconds("W") for stage in costs.stages
    ):
        return schedule
    best, seconds = schedule, _step_seconds(schedule, costs)
    for rank in range(schedule.num_ranks):
        actions = list(best.actions)
        actions[rank] = _fuse_neighbours(actions[rank])
        fused = replace(best, actions=tuple(actions))
        if _step_seconds(fused, costs) < seconds:
            best, seconds = fused, _step_seconds(fused, costs)
    return best


def _fuse_neighbours(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Puts each W that stands directly behind its B together with it."""
    fused: list[Action] = []
    for action in actions:
        before = fused[-1] if fused else None
        if (
            isinstance(action, Compute)
            and action.kind == "W"
            and before == action._replace(kind="B")
        ):
            fused[-1] = action._replace(kind="BW")
        else:
            fused.append(action)
    return tuple(fused)
