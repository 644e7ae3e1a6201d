"""The best schedule for given costs and memory, among many."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.generators import (
    V_SHAPED,
    check_counts,
    is_v_shaped,
    make_placement,
    make_schedule,
)
from tarantella_pp.schedule.lowering import lower, parts_of
from tarantella_pp.schedule.players import ListScheduler
from tarantella_pp.schedule.schedule import Compute, Kind, Link, Schedule, Transfer
from tarantella_pp.schedule.simulator import Costs, StepTimeline, simulate
from tarantella_pp.schedule.spec import SEARCHED


def search_schedule(
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    placement: Sequence[int] | None = None,
    costs: Costs | None = None,
    in_flight_limit: int | Sequence[int] | None = None,
) -> Schedule:
    """Finds ``zb-auto``: the schedule of the fastest simulated step within a memory limit.

    The heuristic search of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1,
    played with the costs at hand: how many forwards the stages run ahead, and what comes first
    otherwise, are tried in all combinations; weight gradients fill gaps, also too small ones. The
    best of them and the named schedules are simulated. This takes a fraction of a second for 8
    stages and 32 micro-batches, and some seconds for 32 and 128.

    Example:
        Within the memory of twice 1F1B::

            stage = StageCosts(1.0, 1.0, 0.5)
            search_schedule(8, 24, costs=Costs((stage,) * 8), in_flight_limit=16)
    """
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, num_ranks=num_ranks)
    where = make_placement(num_stages, num_ranks, placement)
    costs = Costs.uniform(num_stages) if costs is None else costs
    if len(costs.stages) != num_stages:
        raise ScheduleError(f"Expected costs of {num_stages} stages. Received: {len(costs.stages)}")
    limits = _check_limits(in_flight_limit, num_stages, num_micro_batches)
    known = _named_schedules(num_micro_batches, where)
    candidates = [one for one in known if all(map(operator.le, one.held, limits))]
    policies = _policies(limits, len(set(where)))
    players = (_PolicyScheduler(where, num_micro_batches, costs, policy) for policy in policies)
    played = min(players, key=ListScheduler.play)
    candidates.append(replace(known[0], actions=played.orders()))
    return min(candidates, key=lambda one: simulate(lower(one, blocking=False), costs).step_seconds)


def repeat_in_bubbles(
    schedule: Schedule,
    costs: Costs,
    stages: Container[int],
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
) -> Schedule:
    """Puts R before backward passes of some stages whose gradient comes late, if that is faster.

    Liu et al., "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism", PPoPP
    2025. An R and a backward pass that is shorter by it take no longer than one that repeats::

        rank 0  .. BW0------ ......... BW1------
        rank 0  .. R0 BW0--- R1 ... BW1---
    """

    def play(tried: Schedule) -> StepTimeline:
        return simulate(lower(tried, links, gradient_links, blocking=False), costs)

    best, step = schedule, play(schedule)
    least = step.step_seconds
    # What is faster on one rank lets others wait, so there is more to find.
    while late := _late(step, costs, stages) - schedule.repeated:
        schedule = schedule.repeating(late)
        step = play(schedule)
        if step.step_seconds < least:
            best, least = schedule, step.step_seconds
    return best


def _late(step: StepTimeline, costs: Costs, stages: Container[int]) -> set[tuple[int, int]]:
    """Stage and micro-batch of backward passes before which a rank has nothing to do."""
    found = set()
    for own in step.events:
        free = 0.0
        for event in own:
            action = event.action
            if (
                isinstance(action, Compute)
                and action.kind in ("B", "BW")
                and action.stage in stages
                and costs.stages[action.stage].repeated
                and event.start > free
            ):
                found.add((action.stage, action.micro_batch))
            if not isinstance(action, Transfer) or action.operation == "S":
                free = event.end
    return found


def _named_schedules(num_micro_batches: int, placement: tuple[int, ...]) -> list[Schedule]:
    """Returns the known schedules to begin with; GPipe and interleaving have never been better."""
    names = ["1f1b", "zb-h1", *(V_SHAPED if is_v_shaped(placement) else ())]
    made = [make_schedule(n, len(placement), num_micro_batches, placement=placement) for n in names]
    apart = [tuple(part for action in own for part in parts_of(action)) for own in made[0].actions]
    return [replace(one, name=SEARCHED) for one in (*made, replace(made[0], actions=tuple(apart)))]


def _check_limits(
    limits: int | Sequence[int] | None, num_stages: int, num_micro_batches: int
) -> tuple[int, ...]:
    if limits is None:
        limits = num_micro_batches
    bounds = (limits,) * num_stages if isinstance(limits, int | float) else tuple(limits)
    if len(bounds) != num_stages or min(bounds) < 1:
        raise ScheduleError(
            f"Expected at least 1 micro-batch for each of the {num_stages} stages. "
            f"Received: in_flight_limit={limits}"
        )
    return tuple(min(int(bound), num_micro_batches) for bound in bounds)


def _policies(limits: Sequence[int], num_ranks: int) -> Iterator[_Policy]:
    # Runs ahead as 1F1B, eager 1F1B and all that memory allows. More ways, such as twice 1F1B, have
    # found nothing better.
    left = range(len(limits), 0, -1)
    runs_ahead = (left, [2 * stages - 1 for stages in left], limits)
    warm_ups = {tuple(map(min, limits, ahead)) for ahead in runs_ahead}
    # Only where ranks have several stages can these be in each other's way.
    depths = (False, True) if num_ranks < len(limits) else (False,)
    for options in product(sorted(warm_ups), (False, True), (False, True), depths):
        yield _Policy(tuple(limits), *options)


@dataclass(frozen=True)
class _Policy:
    """What a free rank does next."""

    limits: tuple[int, ...]  # micro-batches that each stage may hold
    ahead: tuple[int, ...]  # forwards without their backward
    fused: bool = False
    forward_first: bool = False
    deepest_first: bool = False


class _PolicyScheduler(ListScheduler):
    """Plays all ranks of a chain of stages with real costs, each taking what a policy prefers."""

    def __init__(
        self, placement: Sequence[int], num_micro_batches: int, costs: Costs, policy: _Policy
    ) -> None:
        super().__init__(placement, num_micro_batches)
        self._costs, self._policy = costs, policy
        self._stages: list[list[int]] = [[] for _ in range(1 + max(placement))]
        for stage, rank in enumerate(placement):
            self._stages[rank].append(stage)
        self._begun = {kind: [0] * len(placement) for kind in "FBW"}

    def choose(self, rank: int, now: float) -> Compute | None:
        """Returns what `rank` does now, or None if it has to wait or wants to."""
        action = self._preferred(rank, now)
        if action is not None:
            for part in action.kind:
                self._begun[part][action.stage] += 1
        return action

    def seconds(self, action: Compute) -> float:
        """Returns the seconds of a computation."""
        return self._costs.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, source: int, target: int) -> float:
        """Returns the seconds from the end of a computation to its message being there."""
        if self.placement[source] == self.placement[target]:
            return 0.0
        link = self._costs.link(source, target)
        overhead = self._costs.send_seconds + self._costs.receive_seconds
        return link.latency + link.seconds + overhead

    def _preferred(self, rank: int, now: float) -> Compute | None:
        """Returns the best F or B that can run now, else a W."""
        kinds: tuple[Kind, ...] = ("F", "B")
        ready = [
            Compute(stage, kind, self._begun[kind][stage])
            for stage in self._stages[rank]
            for kind in kinds
            if self._possible_from(stage, kind) <= now
        ]
        if ready:
            best = min(ready, key=self._preference)
            return best._replace(kind="BW") if self._policy.fused and best.kind == "B" else best
        for stage in self._stages[rank]:
            index = self._begun["W"][stage]
            if index < self._begun["B"][stage]:
                return Compute(stage, "W", index)
        return None

    def _possible_from(self, stage: int, kind: Kind) -> float:
        """Returns from when on the stage's next F or B can run; infinity if that is not known."""
        index = self._begun[kind][stage]
        begun = self._begun["F"][stage]
        if kind == "F":
            full = begun - self._begun["W"][stage] >= self._policy.limits[stage]
            if full or begun - self._begun["B"][stage] >= self._policy.ahead[stage]:
                return math.inf
        elif index >= begun:
            return math.inf
        return self.arrival(Compute(stage, kind, index))

    def _preference(self, action: Compute) -> tuple[bool, int, int]:
        """Returns the sort key of an action that could run: the smallest runs."""
        forward_last = (action.kind == "F") != self._policy.forward_first
        if self._policy.deepest_first:
            return (forward_last, -action.stage, action.micro_batch)
        return (forward_last, action.micro_batch, -action.stage)
