"""The step of a plan, simulated, as the rows that pictures show."""

from __future__ import annotations

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.pictures import Bar, StepBars
from tarantella_pp.partition.plan import Plan
from tarantella_pp.partition.plan_simulation import HardwareSpec, PlanSimulation, ideal_step
from tarantella_pp.schedule import Compute
from tarantella_pp.simulation.scaling import PipelineStep


def simulated_step(
    plan: Plan, machine: HardwareSpec | None = None, *, num_ranks: int | None = None
) -> StepBars:
    """Simulates one step of a plan, to be drawn.

    Args:
        plan: The plan.
        machine: The ranks and what connects them. Default: any, and links that take no time; then
            only the ratios of times mean something.
        num_ranks: Number of ranks of a pipeline. Default: what the schedule needs, else one for
            each stage.

    Returns:
        The rows of all ranks.

    Raises:
        ScheduleError: There is no such schedule, it cannot run with so many ranks, or the step is
            too large to be played.
    """
    if machine is None:
        step = ideal_step(plan, num_ranks)
    else:
        simulation = PlanSimulation(plan, machine, plan.schedule, plan.num_micro_batches)
        step = simulation.step(num_ranks)
    note = "Times follow the FLOPs of the stages; each gradient takes as long as the forward pass"
    if plan.recompute:
        note += ", which stages that recompute repeat"
    messages = "messages take no time" if machine is None else "messages take what links allow"
    return step_bars(step, in_seconds=machine is not None, note=f"{note}, and {messages}.")


def step_bars(step: PipelineStep, *, in_seconds: bool = True, note: str = "") -> StepBars:
    """Turns a step that was played into the rows that pictures show.

    Args:
        step: The step.
        in_seconds: Whether its times are seconds; otherwise only their ratios mean something.
        note: Where the times come from, in a sentence.

    Returns:
        The rows of all ranks.

    Raises:
        ScheduleError: The step was too large to be played.
    """
    if step.timeline is None:
        raise ScheduleError(
            f"A step of {len(step.placement)} stages and so many micro-batches is too large to be "
            "drawn; fewer micro-batches look alike."
        )
    bars = []
    names = []
    for rank, events in enumerate(step.timeline.events):
        stages = [stage for stage, owner in enumerate(step.placement) if owner == rank]
        text = ", ".join(map(str, stages))
        names.append(f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {text})")
        for event in events:
            action = event.action
            if isinstance(action, Compute):
                label = str(action) if len(stages) > 1 else f"{action.kind}{action.micro_batch}"
                bars.append(Bar(rank, event.start, event.end, label, action.kind))
    return StepBars(step.schedule, tuple(names), tuple(bars), in_seconds, note)
