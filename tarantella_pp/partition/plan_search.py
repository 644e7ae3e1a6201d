"""The plan with the fastest step that fits, or what would fit where none does."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from tarantella_pp.errors import PlanError, ScheduleError
from tarantella_pp.partition.best_stages import Solution
from tarantella_pp.partition.graph.ideals import summed
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import GIVEN, PlanOptions, Settings
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, roofline_seconds
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import common_limit
from tarantella_pp.partition.plan.plan_simulation import (
    MOST_PLAYED,
    PlanSimulation,
    with_repeats,
    with_step,
)
from tarantella_pp.partition.planner import WORTHS, Planner
from tarantella_pp.schedule import ScheduleSpec

# Seconds of the processor after which no more is tried.
PATIENCE = 60.0
# Effort of all solutions (see `Planner.effort`) after which stages are only found for what is
# likely to be best: half a second or so. A plan must not depend on how fast it was made.
QUICK = 11_000
# Effort of one solution beyond which no more is tried once something is found.
SLOW = 4_000
# Share of a step that a further plan has to save.
WORTHWHILE = 0.05

# Simulated seconds of a step, and the plan.
Timed = tuple[float, Plan]


@dataclass(frozen=True)
class Candidate:
    """A number of micro-batches of a search."""

    search: PlanSearch  # the search
    options: Settings  # what its plan is for
    solution: Solution  # the stages that are simulated
    final: bool  # whether they are the best for this number, within the limit

    @cached_property
    def least_seconds(self) -> float:
        """Seconds that its simulated step is not below: the busiest rank's work."""
        options, spec, planner = self.options, self.search.spec, self.search.planner
        samples = -(-options.batch_size // options.num_replicas) / options.num_micro_batches
        costs, machine = planner.costs(options), planner.machine or HardwareSpec()
        seconds = np.array(costs.seconds or roofline_seconds(planner.work, costs.rows, machine))
        forward, *backward = samples / costs.rows * seconds.T
        work = forward + min(1.0, machine.split_factor) * sum(backward)
        if spec.custom is None:
            spec = ScheduleSpec.of(spec.named, spec.num_stages, spec.num_ranks)
        ranks = np.array(spec.placement)[list(self.solution.assignment)]
        return float(options.num_micro_batches * summed(ranks, work).max())

    @cached_property
    def timed(self) -> Timed:
        """Simulated seconds of a step, or a guess, and the plan that was simulated."""
        return self.search.timed(self.search.written(self.solution, self.options))


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """Makes plans of a model, with some options left open."""

    planner: Planner  # the model, and the machine that its steps are simulated on
    given: PlanOptions  # the options; `num_micro_batches` and `recompute` may be open, to be chosen
    spec: ScheduleSpec  # the schedule
    # Whether to balance memory it is enough to count what adds up: where that is one of several
    # ways to find a fast plan
    roughly: bool = False
    # Bytes of a rank, which its stages share as they need them; instead of limits of stages
    rank_limit: int | None = None

    def options(
        self, *, alone: bool = False, worth: float | None = None, **changes: Any
    ) -> Settings:
        """Returns the options, some changed; `alone` as if each stage had a rank, of any size."""
        settings = replace(self.given, **changes).settled(self.spec)
        settings = self.planner.recomputing(settings, worth)
        return msgspec.structs.replace(settings, ranks=()).limited_to(None) if alone else settings

    def candidates(self) -> list[Candidate]:
        """Returns the numbers of micro-batches to choose from, memory limits left out."""
        usual = self.options().limited_to(None)
        solution, near = self.planner.solve(usual, roughly=self.roughly), usual.num_micro_batches
        found = []
        for count in sorted(
            self._counts(limited=self.given.limited), key=lambda n: abs(math.log(n / near))
        ):
            options = self.options(num_micro_batches=count).limited_to(None)
            own, alike = solution, count == near
            # By FLOPs only weights come anew for each micro-batch: that is left for the best.
            differs = options.balance != "flops" or bool(options.ranks)
            if not alike and differs and self.planner.spent < QUICK:
                own, alike = self.planner.solve(options, roughly=self.roughly), True
            found.append(Candidate(self, options, own, alike and not self.given.limited))
        return found

    @property
    def _is_slow(self) -> bool:
        """Whether one solution takes long enough to be content with few."""
        return self.given.balance != GIVEN and self.planner.effort > SLOW

    def within_limit(self, candidate: Candidate, deadline: float) -> list[Timed]:
        """Makes plans of a candidate within the limit; stages recompute little, if any."""
        if (size := self.rank_limit) is not None:
            seconds, plan = candidate.timed
            needed = plan.rank_bytes(plan.num_ranks)
            if max(needed) > size:
                return []
            pairs = zip(plan.stages, plan.ranks, strict=True)
            limits = tuple(size * stage.memory_bytes // needed[rank] for stage, rank in pairs)
            return [(seconds, plan.limited_to(limits))]
        if candidate.final:
            return [candidate.timed]
        count = candidate.options.num_micro_batches
        options = self.options(num_micro_batches=count)
        if options.limits and self.planner.least_memory(options) > max(options.limits):
            return []
        found = [self.timed(plan) for plan in self._try(num_micro_batches=count)]
        # No stages are faster under a limit than without, whatever they recompute.
        if found and (1 - WORTHWHILE) * found[0][0] <= candidate.timed[0]:
            return found
        for worth in self._worths:
            if time.thread_time() > deadline or (found and self._is_slow):
                break
            found += [self.timed(plan) for plan in self._try(num_micro_batches=count, worth=worth)]
        return found

    def smallest_memory_plan(self) -> Plan:
        """Makes the plan whose largest stage needs the least memory, whatever the limit."""
        smallest = max(self._counts(limited=True))  # micro-batches, which need the least of all
        balance = GIVEN if self.given.balance == GIVEN else "memory"
        free: dict[str, Any] = {"balance": balance, "num_micro_batches": smallest, "alone": True}
        options = self.options(**free)
        least = self.written(self.planner.solve(options), options)
        for worth in self._worths[-1:] if self._is_slow else self._worths:
            least = min([least, *self._try(**free, worth=worth)], key=largest_stage)
        return least

    def written(self, solution: Solution, options: Settings) -> Plan:
        """Writes down a plan, with what only the schedule itself can say."""
        plan, custom = self.planner.write(solution, options), self.spec.custom
        if custom is None:
            return plan
        return msgspec.structs.replace(plan, schedule_text=custom.to_text())

    def timed(self, plan: Plan) -> Timed:
        """Plays a step of a plan; a schedule that is searched for counts as it is before."""
        machine = plan.machine or HardwareSpec()
        simulation = PlanSimulation(plan, machine, self.spec.named, plan.num_micro_batches)
        try:
            step = simulation.step(self.spec.num_ranks)
        except ScheduleError:  # too large to be played
            return math.inf, plan
        return simulation.point(step, plan.num_replicas).step_seconds, plan

    def _counts(self, *, limited: bool) -> list[int]:
        """Returns the numbers of micro-batches to choose from."""
        options = self.options()
        if self.given.num_micro_batches is not None:
            return [options.num_micro_batches]
        stages, samples = options.num_stages, options.batch_size // options.num_replicas
        if self.spec.num_ranks == 1 and not limited:  # nobody waits for a first micro-batch
            return [1]
        most = max(1, min(samples // self.planner.least_rows, MOST_PLAYED // stages))
        if not limited:
            most = min(most, 16 * stages)
        counts = [n for n in range(1, most + 1) if samples % n == 0]
        if not any(stages <= n <= 8 * stages for n in counts):
            counts += [2**k for k in range(most.bit_length()) if samples % 2**k]
        return counts

    def _try(self, **changes: Any) -> list[Plan]:
        """Makes a plan, if there is one: a limit may be in the way."""
        options = self.options(**changes)
        try:
            by_sums = "worth" in changes
            solution = self.planner.solve(options, roughly=self.roughly, by_sums=by_sums)
            if by_sums:
                options = self.planner.refined(solution, options)
            return [self.written(solution, options)]
        except PlanError:
            if options.limits is None:
                raise
        return []

    @property
    def _worths(self) -> tuple[float, ...]:
        """What a byte may be worth to stages that recompute, where that is open."""
        return WORTHS[1::2] if self.given.recompute is None else ()


def in_order(timed: Timed) -> tuple[float, int]:
    """Orders plans: the fastest first, of equal ones the smallest."""
    return (timed[0], largest_stage(timed[1]))


def largest_stage(plan: Plan) -> int:
    """Returns the bytes of the largest stage."""
    return max(stage.memory_bytes for stage in plan.stages)


def choose_plan(
    searches: Sequence[PlanSearch],
    further: Callable[[Plan | None], Sequence[PlanSearch]] = lambda best: (),
) -> Plan | None:
    """Makes the plan whose step is the shortest, within the memory limit; `further` if worth it."""
    deadline = time.thread_time() + PATIENCE
    best = _fastest(_candidates(searches, deadline), deadline)
    below, plan = (math.inf, None) if best is None else ((1 - WORTHWHILE) * best[0], best[1])
    best = _fastest(_candidates(further(plan), deadline), deadline, below) or best
    return None if best is None else with_step(with_repeats(best[1]))


def _candidates(searches: Sequence[PlanSearch], deadline: float) -> list[Candidate]:
    found: list[Candidate] = []
    for search in searches:
        if not found or time.thread_time() < deadline:
            found += search.candidates()
    return found


def _played(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields the fastest first; steps that cannot be the next are not played yet."""
    waiting = [((one.least_seconds, -1), place, one) for place, one in enumerate(candidates)]
    heapq.heapify(waiting)
    while waiting:
        (_, size), place, candidate = heapq.heappop(waiting)
        if size >= 0:
            yield candidate
        else:
            heapq.heappush(waiting, (in_order(candidate.timed), place, candidate))


def _fastest(
    candidates: Iterable[Candidate], deadline: float, below: float = math.inf
) -> Timed | None:
    """Returns the best of some candidates that take less than some seconds."""
    found: list[Timed] = []
    for candidate in _played(candidates):
        # A memory limit makes none of them faster.
        if candidate.timed[0] >= min([below, *(seconds for seconds, _ in found)]):
            break
        within = candidate.search.within_limit(candidate, deadline)
        found += [timed for timed in within if timed[0] < below]
        if found and not candidate.search.given.limited:
            break
    return min(found, key=in_order, default=None)


def infeasible(plan_search: PlanSearch) -> str:
    """Says which limit works, and what needs less."""
    least = plan_search.smallest_memory_plan()
    size, limits = largest_stage(least), plan_search.options().limits or (0,)
    known = "that works" if least.certificate.optimal else "found to work"
    named = format_bytes(limits[0])
    if common_limit(limits) is None:
        known, named = f"one for all stages {known}", "each of its stages"
    return (
        f"No plan of {least.num_stages} stages keeps the memory limit of {named}. "
        f"Received: memory_limit={plan_search.given.memory_limit!r}. The smallest {known} is "
        f"{size} bytes ({format_bytes(size)}), with num_micro_batches={least.num_micro_batches}, "
        f"recompute={least.recompute}. {least.ways_to_less_memory()}"
    )
