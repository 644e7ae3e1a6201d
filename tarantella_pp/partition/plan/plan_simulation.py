"""The step of a plan before it is run: what `tarantella simulate` shows."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, NodeWork, roofline_seconds
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import StagePlan
from tarantella_pp.schedule.generators import V_SHAPED
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.schedule import HeldAgain, Link, Schedule
from tarantella_pp.schedule.schedule_search import repeat_in_bubbles, search_schedule
from tarantella_pp.schedule.simulator import Costs, LinkCosts, StageCosts, StepTimeline, simulate
from tarantella_pp.schedule.spec import SEARCHED, ScheduleSpec

# Where the scaling curve ends.
MOST_RANKS = 4096
# Stages x micro-batches up to which a step is played, in about a second, and those of `zb-auto`,
# which plays dozens of schedules.
MOST_PLAYED, MOST_SEARCHED = 20_000, 1_000
# How often the bytes of a weight's gradient move besides, to be added to a sum.
SUMMING = 2.0

AnyPlan = TypeVar("AnyPlan", bound=PlanData)


def planned_step(plan: PlanData) -> StepTimeline:
    """Plays the step of a plan on its machine, with all replicas: what all displays show."""
    simulation = _as_planned(plan, plan.num_micro_batches)
    return simulation.replicated(simulation.step(), plan.num_replicas)


def _as_planned(plan: PlanData, num_micro_batches: int) -> PlanSimulation:
    # Plans from before they named a machine are played on any, with messages that take no time.
    machine = plan.machine or HardwareSpec(bandwidth=None, latency=0.0)
    return PlanSimulation(plan, machine, plan.schedule, num_micro_batches)


def with_step(plan: AnyPlan) -> AnyPlan:
    """Adds the bubble and the seconds of a step to a plan, unless it is too large to simulate."""
    try:
        step = planned_step(plan)
    except ScheduleError:
        return msgspec.structs.replace(plan, bubble=None, step_seconds=None)
    seconds = None if plan.machine is None else step.step_seconds
    return msgspec.structs.replace(plan, bubble=step.bubble_fraction, step_seconds=seconds)


def with_repeats(plan: AnyPlan) -> AnyPlan:
    """Has stages of a named schedule make things again while their ranks would wait."""
    spec = plan.schedule_spec()
    if not plan.recomputes() or spec.custom is not None or spec.name == SEARCHED:
        return plan
    simulation = _as_planned(plan, plan.num_micro_batches)
    found = simulation.repeating(spec.make(plan.num_micro_batches), simulation.costs())
    plan = msgspec.structs.replace(plan, stages=_holding(plan, found))
    return msgspec.structs.replace(plan, in_bubbles=tuple(sorted(found.repeated)))


def _holding(plan: PlanData, schedule: Schedule) -> tuple[StagePlan, ...]:
    """The stages of a plan with what they hold under a schedule."""
    planned, now = plan.held_again, schedule.held_again()
    return tuple(
        msgspec.structs.replace(
            stage,
            in_flight=schedule.held[i],
            recomputed_bytes=_recomputed_bytes(stage, was, held) if plan.recomputes(i) else 0,
            working_bytes=stage.working_bytes
            + max(0, held.micro_batches - was.micro_batches) * stage.waiting_bytes,
        )
        for i, (stage, was, held) in enumerate(zip(plan.stages, planned, now, strict=True))
    )


def _recomputed_bytes(stage: StagePlan, planned: HeldAgain, now: HeldAgain) -> int:
    """Bytes that a stage holds of what it makes again, if it does so of other micro-batches."""
    if now.whole:
        return now.micro_batches * stage.repeated_bytes
    more = now.micro_batches - planned.micro_batches
    return max(0, stage.recomputed_bytes + more * stage.repeated_bytes)


def searched(plan: PlanData, spec: ScheduleSpec, num_micro_batches: int) -> ScheduleSpec:
    """Searches for the schedule `zb-auto` of a plan, with the costs that it was planned with."""
    simulation = _as_planned(plan, num_micro_batches)
    found = simulation.search(spec, simulation.costs(spec.num_ranks), _search_limits(plan))
    return ScheduleSpec.of_custom(found, spec.num_stages, spec.num_ranks)


def _search_limits(plan: PlanData) -> tuple[int, ...]:
    bounds = []
    for i, stage in enumerate(plan.stages):
        bound = 2 * plan.num_stages - 1  # with which no bubble is left: Qi et al., ICLR 2024
        if plan.limits is not None:
            left = max(0, plan.limits[i] - stage.memory_bytes)
            bound = stage.in_flight + left // max(1, stage.activation_bytes + stage.waiting_bytes)
        # A memory limit that was kept by recomputing leaves no room to hold more.
        if plan.recomputes(i):
            bound = stage.in_flight  # what waits for its weight gradients is not planned for
        bounds.append(min(plan.num_micro_batches, max(bound, stage.in_flight)))
    return tuple(bounds)


def with_findings(plan: AnyPlan, spec: ScheduleSpec, fallbacks: Mapping[int, str]) -> AnyPlan:
    """Returns a plan with what training has shown of its schedule and stages."""
    if fallbacks:
        reasons = tuple(f"stage {stage}: {fallbacks[stage]}" for stage in sorted(fallbacks))
        plan = msgspec.structs.replace(plan, fallbacks=reasons)
    if spec.custom is None or plan.schedule_text is not None:
        return plan
    stages = _holding(plan, spec.make(plan.num_micro_batches))
    text = spec.custom.to_text()
    return with_step(msgspec.structs.replace(plan, stages=stages, schedule_text=text))


def stage_seconds(
    plan: PlanData, machine: HardwareSpec, samples: float
) -> list[tuple[float, float, float]]:
    """Returns the seconds of each stage: forward, gradients of inputs, gradients of weights."""
    stages, nodes = plan.assignment, plan.work
    if not nodes:
        stages = tuple(range(plan.num_stages))
        nodes = tuple(NodeWork(s.flops, 0.0, s.parameter_bytes) for s in plan.stages)
    sums = [(0.0, 0.0, 0.0)] * plan.num_stages
    for stage, parts in zip(stages, roofline_seconds(nodes, samples, machine), strict=True):
        forward, back, weights = map(operator.add, sums[stage], parts)
        sums[stage] = forward, back, weights
    return sums


class ScalePoint(NamedTuple):
    """A plan's step on a number of ranks."""

    num_ranks: int
    num_replicas: int
    step_seconds: float  # gradients summed over replicas
    exposed_seconds: float  # of these, what waits for the sums alone
    samples: int
    samples_per_second: float
    speed_up: float  # samples per second over those of one rank alone
    efficiency: float  # speed-up by the number of ranks


@dataclass(frozen=True, slots=True)
class PlanSimulation:
    """A plan on a machine; a batch grows with the replicas, for each has its micro-batches."""

    plan: PlanData
    machine: HardwareSpec
    schedule: str
    num_micro_batches: int  # on each replica, at most

    @property
    def samples(self) -> int:
        """Samples of a step on one replica."""
        return -(-self.plan.batch_size // self.plan.num_replicas)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each replica, no more than it has samples."""
        return min(self.num_micro_batches, self.samples)

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch, rounded up."""
        return -(-self.samples // self.micro_batches)

    def costs(self, num_ranks: int | None = None) -> Costs:
        """Returns the seconds and bytes of the plan's stages and messages."""
        # Memory must hold the largest micro-batch; time adds up over all of them.
        mean = self.samples / self.micro_batches
        seconds = stage_seconds(self.plan, self.machine, mean)
        repeats = self.plan.repeats
        now = self.spec(num_ranks).held_again(self.micro_batches) if repeats else ()
        again = {
            i: _recomputed_bytes(self.plan.stages[i], held, now[i]) for i, held in repeats.items()
        }
        stages = [self._stage(i, mean, parts, again.get(i)) for i, parts in enumerate(seconds)]
        sizes: Counter[Link] = Counter()
        for cut in self.plan.cuts:
            sent = self.plan.sent(cut)
            for target in cut.targets:
                sizes[cut.source, target] += sent + cut.mask_bytes
                sizes[target, cut.source] += sent if cut.has_gradient else 0
        scale = mean / self.plan.micro_batch_size / (self.machine.bandwidth or math.inf)
        links = {key: LinkCosts(size * scale, self.machine.latency) for key, size in sizes.items()}
        return Costs(tuple(stages), links)

    def _stage(
        self, index: int, mean: float, seconds: tuple[float, float, float], recomputed: int | None
    ) -> StageCosts:
        """Costs of a stage for micro-batches of `mean` samples; bytes of the planned size."""
        # Weight gradients are added to a sum besides, where that was not measured.
        stage = self.plan.stages[index]
        forward, back, weights = seconds
        machine, summed = self.machine, 0.0
        if stage.forward_seconds is None or stage.backward_seconds is None:
            summed = SUMMING * stage.parameter_bytes / (machine.memory_bandwidth or math.inf)
        else:
            # What was measured is divided as arithmetic is, in halves where nothing is frozen.
            share, both = mean / self.plan.micro_batch_size, back + weights
            part = back / both if both else 0.5
            forward, backward = share * stage.forward_seconds, share * stage.backward_seconds
            back, weights = part * backward, (1 - part) * backward
        # Apart, both gradients repeat work that one call shares; a repeated forward pass is
        # needed by the first of them only.
        once, apart = machine.action_seconds, machine.split_factor
        larger = self.micro_batch_size / self.plan.micro_batch_size
        moving = stage.working_bytes + stage.buffer_bytes
        static = stage.state_bytes + larger * (moving + (recomputed or 0))
        again = 0.0 if recomputed is None else stage.repeated * forward
        sizes = {"activation_bytes": larger * stage.activation_bytes, "static_bytes": static}
        if not self.plan.has_backward(index):
            return StageCosts(once + forward, **sizes)
        return StageCosts(
            forward=once + forward,
            input_gradient=once + again + apart * back,
            weight_gradient=once + summed + apart * weights,
            full_backward=once + again + summed + back + weights,
            repeated=again,
            **sizes,
        )

    def step(self, num_ranks: int | None = None) -> StepTimeline:
        """Plays the step of one replica."""
        spec, count = self.spec(num_ranks), self.micro_batches
        searched = spec.name == SEARCHED and spec.custom is None
        if spec.num_stages * count > (MOST_SEARCHED if searched else MOST_PLAYED):
            raise ScheduleError(
                f"A step of {spec.num_stages} stages and {count} micro-batches of {spec.name} is "
                "too large to be played. Take fewer micro-batches."
            )
        costs = self.costs(num_ranks)
        if searched:
            # A schedule that is searched for holds no more than was planned.
            limit = [stage.in_flight for stage in self.plan.stages] if self._runs_own else None
            schedule = self.search(spec, costs, limit)
        else:
            schedule = spec.make(count)
        lowered = lower(schedule, self.plan.links, self.plan.gradient_links, blocking=False)
        return simulate(lowered, costs)

    def search(self, spec: ScheduleSpec, costs: Costs, limits: Sequence[int] | None) -> Schedule:
        """Searches for the schedule `zb-auto` within numbers of micro-batches in flight."""
        found = search_schedule(
            spec.num_stages, self.micro_batches, placement=spec.placement, costs=costs,
            in_flight_limit=limits,
        )  # fmt: skip
        return self.repeating(found, costs)

    def repeating(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Has stages repeat while their ranks would wait, where limits leave room for all of it."""
        plan, held, fits = self.plan, schedule.held_again(), set()
        limits = plan.limits or (0,) * plan.num_stages
        # Who recomputes without a limit wants to have as little in memory as there can be.
        for i, planned in plan.repeats.items():
            stage = plan.stages[i]
            whole = _recomputed_bytes(stage, planned, held[i]._replace(whole=True))
            if stage.memory_bytes - stage.recomputed_bytes + whole <= limits[i]:
                fits.add(i)
        if not fits or schedule.num_stages * schedule.num_micro_batches > MOST_SEARCHED:
            return schedule
        return repeat_in_bubbles(schedule, costs, fits, plan.links, plan.gradient_links)

    def spec(self, num_ranks: int | None = None) -> ScheduleSpec:
        """Returns the schedule on a number of ranks, by default those of the plan."""
        return self.plan.schedule_spec(num_ranks, self.schedule)

    @property
    def _runs_own(self) -> bool:
        """Whether this is the plan's schedule, not another one in its place."""
        return self.schedule == self.plan.schedule

    def without_messages(self) -> PlanSimulation:
        """Returns the same on a machine whose links take no time: what balance alone costs."""
        free = msgspec.structs.replace(self.machine, bandwidth=None, latency=0.0)
        return replace(self, machine=free)

    def replicated(self, step: StepTimeline, num_replicas: int) -> StepTimeline:
        """Returns the step of several replicas, with the sums of their gradients."""
        # A ring for each stage: each of R replicas sends 2 (R - 1) messages of a share of 1 / R
        # (Patarasuk and Yuan, JPDC 69, 2009).
        if num_replicas == 1:
            return replace(step, reductions=())
        share, latency = num_replicas * (self.machine.bandwidth or math.inf), self.machine.latency
        messages = 2 * (num_replicas - 1)
        seconds = [
            [messages * (size / share + latency) if size else 0.0 for size in stage.reduced_bytes]
            for stage in self.plan.stages
        ]
        return step.with_reductions(seconds)

    def point(self, step: StepTimeline, num_replicas: int) -> ScalePoint:
        """Returns what the step of several replicas comes to."""
        step = self.replicated(step, num_replicas)
        seconds = step.step_seconds or math.inf
        num_ranks, samples = num_replicas * step.num_ranks, num_replicas * self.samples
        speed_up = num_replicas * step.serial_seconds / seconds
        return ScalePoint(
            num_ranks, num_replicas, step.step_seconds, step.exposed_seconds, samples,
            samples / seconds, speed_up, speed_up / num_ranks,
        )  # fmt: skip

    def curve(self, step: StepTimeline) -> list[ScalePoint]:
        """Returns the steps on 2 to 4,096 ranks."""
        # Up to a rank for each stage there is one pipeline, whose ranks own several stages; then
        # 2, 4, 8 ... replicas of it. V-shaped ones need two stages on each rank, and a schedule of
        # one's own names its ranks.
        size, custom = step.num_ranks, self._runs_own and self.plan.schedule_text is not None
        shared = self.schedule not in V_SHAPED and not custom
        fewer = [ranks for ranks in range(2, size) if shared and size % ranks == 0]
        counts = [2**k for k in range(MOST_RANKS.bit_length()) if 2 <= 2**k * size <= MOST_RANKS]
        alone = [self.point(self.step(ranks), 1) for ranks in fewer]
        return alone + [self.point(step, replicas) for replicas in counts]
