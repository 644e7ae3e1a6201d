"""The step of a plan, simulated, as the rows that pictures show."""

from __future__ import annotations

from tarantella_pp.partition.pictures import Bar, StepBars
from tarantella_pp.partition.plan import Plan
from tarantella_pp.runtime.schedule import (
    Compute,
    Costs,
    Schedule,
    StageCosts,
    Timeline,
    lower,
    make_schedule,
    simulate,
)


def simulated_step(
    plan: Plan, costs: Costs | None = None, *, num_ranks: int | None = None
) -> StepBars:
    """Simulates one step of a plan, to be drawn.

    Args:
        plan: The plan.
        costs: Seconds and bytes of its stages. Default: times follow the stages' FLOPs, each of
            the two gradients takes as long as the forward pass, and messages take no time.
        num_ranks: Number of ranks of a pipeline. Default: what the schedule needs, else one for
            each stage.

    Returns:
        The rows of all ranks.

    Raises:
        ScheduleError: There is no such schedule, or it cannot run with so many ranks.
    """
    used = flop_costs(plan) if costs is None else costs
    links = [(cut.source, target) for cut in plan.cuts for target in cut.targets]
    back = [(c.source, target) for c in plan.cuts if c.has_gradient for target in c.targets]
    plain = make_schedule(
        plan.schedule,
        plan.num_stages,
        plan.num_micro_batches,
        num_ranks,
        costs=used if plan.schedule == "zb-auto" else None,
    )
    schedule = lower(plain, links, back)
    note = (
        "Times follow the FLOPs of the stages, each gradient takes as long as the forward pass, "
        "and messages take no time."
        if costs is None
        else "Times are simulated from the costs of the stages."
    )
    return step_bars(schedule, simulate(schedule, used), in_seconds=costs is not None, note=note)


def step_bars(
    schedule: Schedule, timeline: Timeline, *, in_seconds: bool = True, note: str = ""
) -> StepBars:
    """Turns a timeline into the rows that pictures show.

    Args:
        schedule: The schedule that was simulated or measured.
        timeline: When each rank did what.
        in_seconds: Whether its times are seconds; otherwise only their ratios mean something.
        note: Where the times come from, in a sentence.

    Returns:
        The rows of all ranks.
    """
    bars = []
    names = []
    for rank, events in enumerate(timeline.events):
        stages = schedule.stages_of(rank)
        text = ", ".join(map(str, stages))
        names.append(f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {text})")
        for event in events:
            action = event.action
            if isinstance(action, Compute):
                label = str(action) if len(stages) > 1 else f"{action.kind}{action.micro_batch}"
                bars.append(Bar(rank, event.start, event.end, label, action.kind))
    return StepBars(timeline.name, tuple(names), tuple(bars), in_seconds, note)


def flop_costs(plan: Plan) -> Costs:
    """Returns costs in which time follows the FLOPs of the stages.

    Args:
        plan: The plan; without any FLOPs all its stages take equally long.

    Returns:
        The costs, in arbitrary units of time.
    """
    total = sum(stage.flops for stage in plan.stages)
    times = [stage.flops / total if total else 1.0 for stage in plan.stages]
    return Costs(
        tuple(
            StageCosts(
                forward=time,
                input_gradient=time,
                weight_gradient=time,
                activation_bytes=stage.activation_bytes,
                static_bytes=stage.state_bytes + stage.buffer_bytes,
            )
            for time, stage in zip(times, plan.stages, strict=True)
        )
    )
