"""From computations to computations, messages and reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import (
    Action,
    Compute,
    Direction,
    Link,
    Operation,
    Transfer,
)
from tarantella_pp.schedule.replay import (
    Replay,
    Routes,
    StartingReductions,
    check_links,
    reductions,
)
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.schedule.validator import check_computations


def lower(
    schedule: Schedule,
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
    buckets: Sequence[int] = (),
    *,
    blocking: bool = True,
) -> Schedule:
    """Adds messages and reductions to a schedule; the order of its computations stays as it is.

    A send stands directly behind the computation that makes its message and a receive directly
    before the one that needs it, and stages on one rank need no message. Where ranks would wait
    for each other if sends blocked, the receive of such a send is moved up to where its rank is
    stuck; so the result gets through even if every send blocks until its receive is posted. Here
    both ranks send, and the receives stand behind computations that neither of them reaches::

        rank 0  0F2 [0>1SF2] 2BW0 [1>2RF1] 2F1          1F1 [1>2SF1] 3BW0 [0>1RF2] 1F2  rank 1

        rank 0  0F2 [0>1SF2 1>2RF1] 2BW0 [] 2F1         posts 1>2RF1 before it sends: rank 1 goes
                                                        on, posts 0>1RF2, and rank 0 goes on

    The reductions of a stage start behind its last weight gradient and the sends that this causes,
    for others wait for messages; in the order of `reductions`.
    """
    if schedule.is_lowered:
        raise ScheduleError("Expected computations only. Received: a schedule that is lowered")
    for own in schedule.actions:
        for action in own:
            if not isinstance(action, Compute):
                raise ScheduleError(f"Expected computations only. Received: {action}")
    if any(buckets) and not schedule.has_backward:
        raise ScheduleError(
            f"The schedule '{schedule.name}' has no backward passes, so no gradients to sum. "
            f"Received: buckets={tuple(buckets)}"
        )
    schedule = replace(schedule, buckets=tuple(buckets))
    forward, backward = check_links(schedule.num_stages, links, gradient_links)
    check_computations(schedule)
    routes = Routes(forward, backward)
    programs = [_program(schedule, rank, routes) for rank in range(schedule.num_ranks)]
    if blocking:
        replay = Replay(programs, blocking=True)
        while stuck := replay.run():
            _unblock(replay, stuck, schedule.placement)
        programs = replay.programs
    actions = tuple(map(tuple, programs))
    return replace(schedule, actions=actions, links=forward, gradient_links=backward)


def _program(schedule: Schedule, rank: int, routes: Routes) -> list[Action]:
    """Returns the actions of one rank with receives before and sends behind computations."""
    program: list[Action] = []
    own = schedule.actions[rank]
    starting = StartingReductions(reductions(schedule.placement, schedule.buckets, rank), own)
    for action in own:
        if isinstance(action, Compute):
            program += _transfers(action, routes.inputs(action), "R", schedule.placement)
            program.append(action)
            program += _transfers(action, routes.outputs(action), "S", schedule.placement)
            program += starting.after(action)
    return program


def _transfers(
    action: Compute, pairs: Iterable[Link], operation: Operation, placement: Sequence[int]
) -> list[Transfer]:
    """Returns one end of the messages of a computation that cross ranks."""
    direction: Direction = "F" if action.kind == "F" else "B"
    return [
        Transfer(source, target, operation, direction, action.micro_batch)
        for source, target in pairs
        if placement[source] != placement[target]
    ]


def _unblock(replay: Replay, stuck: Iterable[int], placement: Sequence[int]) -> None:
    """Moves up the receive of one of the sends at which ranks are stuck: the nearest.

    The send is reached and the rank of the receive waits anyway, so this always helps. Without a
    stuck send all ranks wait for messages that nobody has reached: the computations deadlock.
    """
    heads = [replay.programs[rank][replay.position[rank]] for rank in stuck]
    choices = []
    for head in heads:
        if isinstance(head, Transfer) and head.operation == "S":
            receiver = placement[head.target]
            receive = head._replace(operation="R")
            reached = replay.position[receiver]
            distance = replay.programs[receiver].index(receive, reached) - reached
            choices.append((distance, receive, receiver))
    if not choices:
        waits = ", ".join(
            f"rank {rank} for {head}" for rank, head in zip(stuck, heads, strict=True)
        )
        raise ScheduleError(
            f"The computations wait for each other whatever the messages do: {waits}. Put each "
            "computation behind those that feed it, on all ranks."
        )
    _, receive, receiver = min(choices)
    replay.hoist(receive, receiver)
