"""The best schedule for given costs and memory, among many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Compute
from tarantella_pp.schedule.list_scheduling import Orders
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
from tarantella_pp.simulation.building_blocks import v_orders
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.policies import ROUNDING, Policy, PolicyScheduler
from tarantella_pp.simulation.simulator import simulate
from tarantella_pp.simulation.step_recurrence import StepRecurrence

_BLOCKS = tuple((1, down, 1, up) for down in (1, 2, 3) for up in (1, 2, 3))
"""Building blocks that are tried on V-shaped pipelines: V-Min, V-Half, and what is between."""
_FINALISTS = 4
"""Found schedules that are simulated with all that playing leaves out."""


class _Seconds(NamedTuple):
    """What schedules are compared by, in this order.

    Attributes:
        each: Seconds of each step, of many in a row or of one alone.
        alone: Seconds of one alone.
    """

    each: float
    alone: float


def search_schedule(
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    placement: Sequence[int] | None = None,
    costs: Costs | None = None,
    in_flight_limit: float | Sequence[float] | None = None,
    in_a_row: bool = True,
) -> Schedule:
    """Finds ``zb-auto``: the schedule of the fastest simulated steps within a memory limit.

    Ranks go on with the next step as soon as they are done with one, so what counts is what each of
    many steps in a row takes (see `StepRecurrence`), and of schedules equal in that, what a step
    alone takes.

    The heuristic search of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1,
    played with the costs at hand: how many forwards the stages run ahead, whether weight
    gradients fill gaps that are too small for them, and what comes first otherwise, are tried in
    all combinations; the best of them, the named schedules and, on V-shaped pipelines, repeated
    building blocks that need little memory are simulated. Finally weight
    gradients are run together with their input gradients on those ranks where that is faster.
    This takes a fraction of a second for 8 stages and 32 micro-batches, and some seconds for 32
    and 128.

    Example:
        Within the memory of twice 1F1B, if W needs 0.4 of what a micro-batch keeps::

            stage = StageCosts(1.0, 1.0, 0.5, waiting_share=0.4)
            search_schedule(8, 24, costs=Costs((stage,) * 8), in_flight_limit=16)
    """
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, num_ranks=num_ranks)
    where = make_placement(num_stages, num_ranks, placement)
    costs = Costs.uniform(num_stages) if costs is None else costs
    if len(costs.stages) != num_stages:
        raise ScheduleError(f"Expected costs of {num_stages} stages. Received: {len(costs.stages)}")
    limits = _check_limits(in_flight_limit, num_stages, num_micro_batches)
    shares = [stage.waiting_share for stage in costs.stages]
    known = _named_schedules(num_micro_batches, where)
    finalists = [schedule for schedule in known if _fits(schedule.held(shares), limits)]
    orders = _played(num_micro_batches, where, costs, limits, in_a_row)
    finalists += [replace(known[0], actions=own) for own in orders]
    judged = [(_seconds(schedule, costs, in_a_row), schedule) for schedule in finalists]
    best = min(judged, key=lambda one: one[0])
    if all(s.seconds("BW") >= s.seconds("B") + s.seconds("W") for s in costs.stages):
        return best[1]
    best_alone = min(judged, key=lambda one: one[0].alone)
    fused = [_fuse(one, costs, in_a_row) for one in (best, best_alone)]
    return min(fused, key=lambda one: one[0])[1]


def _fits(held: Sequence[float], limits: Sequence[float]) -> bool:
    """Returns whether stages hold no more than they may."""
    return all(own <= limit + ROUNDING for own, limit in zip(held, limits, strict=True))


def _played(
    num_micro_batches: int,
    placement: tuple[int, ...],
    costs: Costs,
    limits: Sequence[float],
    in_a_row: bool,
) -> list[Orders]:
    """Returns the best orders that playing finds, for steps in a row and for one alone."""
    played = []
    for policy in _policies(num_micro_batches, limits, 1 + max(placement)):
        scheduler = PolicyScheduler(placement, num_micro_batches, costs, policy)
        alone = scheduler.play()
        seconds = scheduler.longest_rank() if in_a_row else alone
        played.append((seconds, alone, scheduler.orders()))
    played.sort(key=lambda outcome: outcome[:2])
    best_alone = min(played, key=lambda outcome: outcome[1])
    return [orders for *_, orders in (*played[:_FINALISTS], best_alone)]


def _named_schedules(num_micro_batches: int, placement: tuple[int, ...]) -> list[Schedule]:
    """Returns the known schedules that the search starts from, under the name of the search."""
    names = ["1f1b", "eager-1f1b", "zb-h1", "gpipe"]
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
    if is_v_shaped(placement):
        blocks = (v_orders(1 + max(placement), num_micro_batches, steps) for steps in _BLOCKS)
        found += [replace(found[0], actions=orders) for orders in blocks]
    return found


def _check_limits(
    limits: float | Sequence[float] | None, num_stages: int, num_micro_batches: int
) -> tuple[float, ...]:
    """Returns the limit of each stage."""
    if limits is None:
        limits = num_micro_batches
    bounds = (limits,) * num_stages if isinstance(limits, int | float) else tuple(limits)
    if len(bounds) != num_stages or min(bounds) < 1:
        raise ScheduleError(
            f"Expected at least 1 micro-batch for each of the {num_stages} stages. "
            f"Received: in_flight_limit={limits}"
        )
    return bounds


def _policies(num_micro_batches: int, bounds: Sequence[float], num_ranks: int) -> Iterator[Policy]:
    """Yields the policies to be tried, each once."""
    limits = tuple(min(bound, num_micro_batches) for bound in bounds)
    left = range(len(bounds), 0, -1)
    several = num_ranks < len(bounds)  # stages on a rank; only then they can be in each other's way
    runs_ahead: list[Sequence[float]] = [left, [2 * stages - 1 for stages in left], limits]
    if not several:
        runs_ahead += [[2 * stages for stages in left], [3 * stages // 2 + 3 for stages in left]]
    warm_ups = {
        tuple(int(min(bound, most)) for bound, most in zip(limits, ahead, strict=True))
        for ahead in runs_ahead
    }
    depths = (False, True) if several else (False,)
    for ahead, fused, forward_first, deepest_first, patience in product(
        sorted(warm_ups), (False, True), (False, True), depths, (0.0, 0.5, 1.0)
    ):
        if not (fused and patience):
            yield Policy(limits, ahead, fused, forward_first, deepest_first, patience)


def _seconds(schedule: Schedule, costs: Costs, in_a_row: bool) -> _Seconds:
    """Returns what a schedule is judged by."""
    lowered = lower(schedule)
    if not in_a_row:
        alone = simulate(lowered, costs).step_seconds
        return _Seconds(alone, alone)
    recurrence = StepRecurrence.of(lowered, costs)
    # What differs less differs by rounding.
    return _Seconds(float(f"{recurrence.period_seconds:.9g}"), recurrence.step_seconds)


def _fuse(
    judged: tuple[_Seconds, Schedule], costs: Costs, in_a_row: bool
) -> tuple[_Seconds, Schedule]:
    """Runs W together with the B just before it on each rank where steps get shorter."""
    seconds, best = judged
    for rank in range(best.num_ranks):
        actions = list(best.actions)
        actions[rank] = _fuse_neighbours(actions[rank])
        fused = replace(best, actions=tuple(actions))
        if (found := _seconds(fused, costs, in_a_row)) < seconds:
            seconds, best = found, fused
    return seconds, best


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
