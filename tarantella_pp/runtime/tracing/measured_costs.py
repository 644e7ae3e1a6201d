"""What a pipeline costs by its recorded steps, and the simulation with these costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from tarantella_pp.runtime.tracing.recorded_step import RecordedStep
from tarantella_pp.runtime.tracing.recorder import (
    METRICS,
    SUMS,
    UPDATE,
)
from tarantella_pp.schedule import Action, Compute, Kind, Link
from tarantella_pp.simulation import Costs, LinkCosts, StageCosts, StepTimeline, simulate


def alike(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Returns the steps of the schedule and batch size that occur most.

    The last batch of a data set is often smaller, and takes less time.
    """
    kinds = Counter((id(step.schedule), step.rows) for step in steps)
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    return [step for step in steps if (id(step.schedule), step.rows) == most]


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """Estimates the costs of stages and messages.

    Computations cost their mean over all micro-batches and typical steps: whatever makes one of
    them take longer now and then is in there, for it makes steps longer, too.

    Handing over costs the sender what its sends take, and taking a message that is there costs
    the receiver what its shortest waits take: those for messages sent before it asked for them.
    Where the receiver waited already when a message was sent, the time until it had it is the
    latency of the link.
    """
    usual: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for step in _typical(steps):
        for spans in step.spans:
            for what, start, end in spans:
                if isinstance(what, Compute):
                    usual[what.stage, what.kind].append(end - start)
    sending: list[float] = []
    taking: list[float] = []
    coming: defaultdict[Link, list[float]] = defaultdict(list)
    for step in steps:
        for action, send, wait in step.messages():
            sending.append(send.end - send.start)
            if send.start < wait.start:
                taking.append(wait.end - wait.start)
            else:
                coming[action.source, action.target].append(max(0.0, wait.end - send.end))
    receive = _median(taking)
    links = {pair: LinkCosts(0.0, max(0.0, _median(s) - receive)) for pair, s in coming.items()}
    others = _median([link.latency for link in links.values()])
    stages = range(steps[0].schedule.num_stages)
    return Costs(
        tuple(_stage_costs(stage, usual) for stage in stages),
        links,
        LinkCosts(0.0, others),
        send_seconds=_median(sending),
        receive_seconds=receive,
    )


def simulated(steps: Sequence[RecordedStep]) -> StepTimeline:
    """Simulates the steps' own schedule with the costs that they show."""
    costs = replace(measured_costs(steps), before=work_between(steps))
    return simulate(steps[0].schedule, costs)


def work_between(steps: Sequence[RecordedStep]) -> dict[Action, float]:
    """Returns how long ranks worked at sums of gradients and updates before they went on."""
    ordered = sorted(steps, key=lambda step: step.timeline.step_seconds)
    seconds: dict[Action, float] = {}
    for spans in ordered[len(ordered) // 2].spans:
        worked = 0.0
        for what, start, end in spans:
            if what in (METRICS, SUMS, UPDATE):
                worked += end - start
            elif worked and not isinstance(what, str):
                seconds[what] = worked
                worked = 0.0
    return seconds


def _typical(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Returns the middle half of the steps of each schedule, by their length."""
    lengths: defaultdict[int, list[RecordedStep]] = defaultdict(list)
    for step in sorted(steps, key=lambda step: step.timeline.step_seconds):
        lengths[id(step.schedule)].append(step)
    return [
        step
        for alike in lengths.values()
        for step in alike[len(alike) // 4 : -(len(alike) // 4) or None]
    ]


def _stage_costs(stage: int, usual: dict[tuple[int, Kind], list[float]]) -> StageCosts:
    seconds = {
        kind: fmean(usual[stage, kind]) if (stage, kind) in usual else 0.0
        for kind in ("F", "B", "W", "BW")
    }
    return StageCosts(seconds["F"], seconds["B"], seconds["W"], seconds["BW"] or None)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
