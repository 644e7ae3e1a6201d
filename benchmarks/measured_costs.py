"""What a pipeline costs by recorded steps, and these steps as the simulator predicts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from tarantella_pp.runtime.executor import RecordedStep, Span
from tarantella_pp.schedule import (
    Compute,
    Costs,
    Kind,
    Link,
    LinkCosts,
    StageCosts,
    StepTimeline,
    Transfer,
    simulate,
)


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """Estimates the costs of stages and messages.

    Computations cost the mean over the micro-batches of the median step: whatever makes one of
    them take longer now and then is in there, for it makes steps longer, too.

    Handing over costs the sender what its sends take, and taking a message that is there costs
    the receiver what its shortest waits take: those for messages sent before it asked for them.
    Where the receiver waited already when a message was sent, the time until it had it is the
    latency of the link.
    """
    usual: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    sending: list[float] = []
    taking: list[float] = []
    coming: defaultdict[Link, list[float]] = defaultdict(list)
    for step in steps:
        for key, seconds in _computations(step).items():
            usual[key].append(fmean(seconds))
        for action, send, wait in _messages(step):
            sending.append(send.end - send.start)
            # Sent before it was asked for: the wait shows what taking costs, not the link.
            if send.start < wait.start:
                taking.append(wait.end - wait.start)
            else:
                coming[action.source, action.target].append(max(0.0, wait.end - send.end))
    receive = _median(taking)
    links = {pair: LinkCosts(0.0, max(0.0, _median(s) - receive)) for pair, s in coming.items()}
    others = _median([link.latency for link in links.values()])
    kinds: tuple[Kind, ...] = ("F", "B", "W", "BW", "R")
    stages = []
    for stage in range(steps[0].schedule.num_stages):
        forward, inputs, weights, both, again = (_median(usual[stage, kind]) for kind in kinds)
        stages.append(StageCosts(forward, inputs, weights, both or None, again))
    return Costs(
        tuple(stages),
        links,
        LinkCosts(0.0, others),
        send_seconds=_median(sending),
        receive_seconds=receive,
    )


def simulated(steps: Sequence[RecordedStep]) -> StepTimeline:
    """Simulates the steps' own schedule with the costs that they show."""
    return simulate(steps[0].schedule, measured_costs(steps))


def _computations(step: RecordedStep) -> Mapping[tuple[int, Kind], Sequence[float]]:
    """The seconds of each kind of computation of each stage; a backward pass with its R."""
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    again: dict[Compute, float] = {}
    for spans in step.spans:
        for what, start, end in spans:
            if isinstance(what, Compute):
                early = again.get(what._replace(kind="R"), 0.0) if what.kind[0] == "B" else 0.0
                found[what.stage, what.kind].append(early + end - start)
                again[what] = end - start
    return found


def _median(values: Sequence[float]) -> float:
    return median(values or [0.0])


def _messages(step: RecordedStep) -> Iterator[tuple[Transfer, Span, Span]]:
    """Iterates over the messages: the send as an action, its span and the wait's."""
    transfers = [
        (span.what, span)
        for spans in step.spans
        for span in spans
        if isinstance(span.what, Transfer)
    ]
    sends = {(a.direction, a.message): (a, span) for a, span in transfers if a.operation == "S"}
    for action, wait in transfers:
        if action.operation == "R":
            yield *sends[action.direction, action.message], wait
