"""The best schedule for given costs and memory, among many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Compute
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.registry import (
    Backward,
    check_counts,
    is_round_robin,
    is_v_shaped,
    make_placement,
    make_schedule,
)
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.schedule.spec import SEARCHED
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.policies import Policy, PolicyScheduler
from tarantella_pp.simulation.simulator import simulate

_FINALISTS = 4
"""Found schedules that are simulated with all that playing leaves out."""


def search_schedule(
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    placement: Sequence[int] | None = None,
    costs: Costs | None = None,
    in_flight_limit: int | Sequence[int] | None = None,
) -> Schedule:
    """Finds ``zb-auto``: the schedule of the shortest simulated step within a memory limit.

    The heuristic search of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1,
    played with the costs at hand: how many forwards the stages run ahead, whether weight
    gradients fill gaps that are too small for them, and what comes first otherwise, are tried in
    all combinations; the best of them and the named schedules are simulated. Finally weight
    gradients are run together with their input gradients on those ranks where that is faster.
    This takes a fraction of a second for 8 stages and 32 micro-batches, and some seconds for 32
    and 128.

    Args:
        num_stages: Number of pipeline stages.
        num_micro_batches: Number of micro-batches of a step.
        num_ranks: Number of ranks, as of `make_schedule`. Default: one for each stage.
        placement: Rank of each stage. Default: stage s on rank ``s % num_ranks``.
        costs: Seconds of stages and messages. Default: F, B and W take equally long and messages
            no time.
        in_flight_limit: The most micro-batches that each stage may hold, one number or one for
            each stage. Default: no limit.

    Returns:
        The schedule, computations only; never slower than the named ones within the limit.

    Raises:
        ScheduleError: If an option cannot work; names it.
    """
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, num_ranks=num_ranks)
    where = make_placement(num_stages, num_ranks, placement)
    costs = Costs.uniform(num_stages) if costs is None else costs
    if len(costs.stages) != num_stages:
        raise ScheduleError(f"Expected costs of {num_stages} stages. Received: {len(costs.stages)}")
    limits = _check_limits(in_flight_limit, num_stages, num_micro_batches)
    known = _named_schedules(num_micro_batches, where)
    played = []
    for policy in _policies(num_stages, num_micro_batches, limits):
        scheduler = PolicyScheduler(where, num_micro_batches, costs, policy)
        played.append((scheduler.play(), scheduler.orders()))
    played.sort(key=lambda outcome: outcome[0])
    finalists = [
        schedule
        for schedule in known
        if all(schedule.in_flight(stage) <= limit for stage, limit in enumerate(limits))
    ]
    finalists += [replace(known[0], actions=orders) for _, orders in played[:_FINALISTS]]
    best = min(finalists, key=lambda schedule: _step_seconds(schedule, costs))
    return _fuse(best, costs)


def _named_schedules(num_micro_batches: int, placement: tuple[int, ...]) -> list[Schedule]:
    """Returns the known schedules that the search starts from, under the name of the search."""
    names = ["1f1b", "zb-h1", "gpipe"]
    names += ["interleaved"] if is_round_robin(placement) else []
    names += ["zb-v"] if is_v_shaped(placement) else []
    found = []
    for name in names:
        ways: tuple[Backward | None, ...] = (
            (None,) if name.startswith("zb-") else ("fused", "split")
        )
        for backward in ways:
            schedule = make_schedule(
                name, len(placement), num_micro_batches, placement=placement, backward=backward
            )
            found.append(replace(schedule, name=SEARCHED))
    return found


def _check_limits(
    limits: int | Sequence[int] | None, num_stages: int, num_micro_batches: int
) -> tuple[int, ...]:
    """Returns the limit of each stage."""
    if limits is None:
        limits = num_micro_batches
    bounds = (limits,) * num_stages if isinstance(limits, int) else tuple(limits)
    if len(bounds) != num_stages or min(bounds) < 1:
        raise ScheduleError(
            f"Expected at least 1 micro-batch for each of the {num_stages} stages. "
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
