"""From computations to messages and reductions, and the six laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import (
    Action,
    Compute,
    Direction,
    Link,
    Message,
    Operation,
    Reduce,
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


def validate(schedule: Schedule, in_flight: Sequence[int] | None = None) -> None:
    """Checks a lowered schedule against the six laws, over all ranks.

    The order of a schedule may come from a formula, a search or a text file; these laws hold it to
    what training needs, before the first step. 1 and 2 keep the numbers right, 3 and 4 keep ranks
    from waiting for ever, 5 bounds memory, 6 keeps replicas in step.

    1. Each stage runs forward and backward of each micro-batch exactly once, on its own rank.
    2. A computation comes after all that it depends on: a forward after the forwards that feed
       it, an input gradient after its own forward and the input gradients of the stages it
       feeds, a weight gradient after its input gradient.
    3. Each link between two ranks carries one message for each micro-batch and direction, and
       each send has its receive.
    4. No deadlock, even if every send blocks until its receive is posted.
    5. No stage holds more micro-batches than `in_flight` declares.
    6. Each bucket of each stage is reduced exactly once, on its own rank, behind the stage's last
       weight gradient, and in the order of `reductions`: the later stage first, its buckets in
       theirs. Replicas run lists that differ in their micro-batches at most, so all of them
       reduce the same buckets in the same order. To start a reduction is to wait for nobody, and
       each list gets through to its end, where they are waited for: no deadlock comes of them.
    """
    if schedule.links is None:
        raise ScheduleError("Expected a schedule with messages; pass it to lower() first")
    forward, backward = check_links(schedule.num_stages, schedule.links, schedule.gradient_links)
    check_computations(schedule)
    routes = Routes(forward, backward)
    _check_messages(schedule, routes)
    _check_reductions(schedule)
    for rank in range(schedule.num_ranks):
        _check_causality(schedule, rank, routes)
    _check_deadlock(schedule)
    if in_flight is not None:
        _check_in_flight(schedule, in_flight)


def check_computations(schedule: Schedule) -> None:
    """Checks the first law: each computation exactly once, on the rank of its stage."""
    seen: set[tuple[int, str, int]] = set()
    for rank, own in enumerate(schedule.actions):
        for position, action in enumerate(own):
            if not isinstance(action, Compute):
                continue
            stage, kind, i = action
            if not (stage < schedule.num_stages and i < schedule.num_micro_batches):
                why = (
                    f"the schedule has {schedule.num_stages} stages and "
                    f"{schedule.num_micro_batches} micro-batches"
                )
                raise broken(rank, position, action, why)
            if schedule.placement[stage] != rank:
                why = f"stage {stage} belongs to rank {schedule.placement[stage]}"
                raise broken(rank, position, action, why)
            # BW is both of B and W.
            for part in kind:
                if (stage, part, i) in seen:
                    raise broken(rank, position, action, f"{stage}{part}{i} is there already")
                seen.add((stage, part, i))
    for part in "FBW" if schedule.has_backward else "F":
        for stage, rank in enumerate(schedule.placement):
            for i in range(schedule.num_micro_batches):
                if (stage, part, i) not in seen:
                    raise ScheduleError(f"Rank {rank}: {stage}{part}{i} is missing")


def broken(rank: int, position: int, action: Action, why: str) -> ScheduleError:
    """Makes the error that names an action and its fault."""
    return ScheduleError(f"Rank {rank}, position {position}, {action}: {why}")


def _check_messages(schedule: Schedule, routes: Routes) -> None:
    """Checks the third law: exactly one send and one receive for each message of each link."""
    missing: set[Transfer] = set()
    for computation in schedule.computations():
        direction: Direction = "F" if computation.kind == "F" else "B"
        for source, target in routes.outputs(computation):
            if schedule.placement[source] != schedule.placement[target]:
                i = computation.micro_batch
                missing.add(Transfer(source, target, "S", direction, i))
                missing.add(Transfer(source, target, "R", direction, i))
    seen: set[Transfer] = set()
    for rank, own in enumerate(schedule.actions):
        for position, action in enumerate(own):
            if not isinstance(action, Transfer):
                continue
            if action in seen:
                raise broken(rank, position, action, "it is there already")
            if action not in missing:
                raise broken(rank, position, action, "there is no such message to transfer")
            stage = action.source if action.operation == "S" else action.target
            if schedule.placement[stage] != rank:
                why = f"stage {stage} belongs to rank {schedule.placement[stage]}"
                raise broken(rank, position, action, why)
            seen.add(action)
    if missing != seen:
        first = min(missing - seen)
        stage = first.source if first.operation == "S" else first.target
        other = "receive" if first.operation == "S" else "send"
        raise ScheduleError(
            f"Rank {schedule.placement[stage]}: {first} is missing; its {other} would wait forever"
        )


def _check_reductions(schedule: Schedule) -> None:
    """Checks the sixth law: the reductions of each rank, in order, none before its gradients."""
    for rank, own in enumerate(schedule.actions):
        order = reductions(schedule.placement, schedule.buckets, rank)
        starting, ready = StartingReductions(order, own), set[Reduce]()
        left = list(order)
        for position, action in enumerate(own):
            if isinstance(action, Compute):
                ready.update(starting.after(action))
            elif isinstance(action, Reduce):
                if left[:1] != [action]:
                    why = f"{left[0] if left else 'none'} is the next reduction of this rank"
                    raise broken(rank, position, action, why)
                if action not in ready:
                    why = f"a weight gradient of stage {action.stage} comes after it"
                    raise broken(rank, position, action, why)
                left.pop(0)
        if left:
            raise ScheduleError(f"Rank {rank}: {left[0]} is missing; other replicas wait for it")


def _check_causality(schedule: Schedule, rank: int, routes: Routes) -> None:
    """Checks the second law on one rank: what an action depends on comes before it."""
    done: set[tuple[int, str, int]] = set()
    arrived: set[Message] = set()
    for position, action in enumerate(schedule.actions[rank]):
        if isinstance(action, Reduce):
            continue
        i = action.micro_batch
        if isinstance(action, Transfer):
            if action.operation == "R":
                arrived.add(action.message)
            elif (action.source, action.direction, i) not in done:
                why = f"{action.source}{action.direction}{i} comes after it"
                raise broken(rank, position, action, why)
            continue
        stage, kind, _ = action
        # W needs the output gradients that B has received, so it comes after its own B.
        before = {"F": None, "B": "F", "BW": "F", "W": "B"}[kind]
        if before is not None and (stage, before, i) not in done:
            raise broken(rank, position, action, f"{stage}{before}{i} comes after it")
        for source, target in routes.inputs(action):
            local = schedule.placement[source] == rank
            if local and (source, kind[0], i) not in done:
                raise broken(rank, position, action, f"{source}{kind[0]}{i} comes after it")
            if not local and (source, target, i) not in arrived:
                why = f"{source}>{target}R{kind[0]}{i} comes after it"
                raise broken(rank, position, action, why)
        done.update((stage, part, i) for part in kind)


def _check_deadlock(schedule: Schedule) -> None:
    """Checks the fourth law by playing all ranks with sends that block."""
    replay = Replay(schedule.actions, blocking=True)
    stuck = replay.run()
    if not stuck:
        return
    waits = []
    for rank in stuck:
        position = replay.position[rank]
        action = replay.programs[rank][position]
        if isinstance(action, Transfer):
            stage = action.target if action.operation == "S" else action.source
            peer = schedule.placement[stage]
            waits.append(f"rank {rank} at position {position}, {action}, for rank {peer}")
    raise ScheduleError(f"Deadlock if sends block: {'; '.join(waits)}")


def _check_in_flight(schedule: Schedule, bounds: Sequence[int]) -> None:
    """Checks the fifth law: the residuals that each stage holds stay within its bound."""
    if len(bounds) != schedule.num_stages:
        raise ScheduleError(
            f"Expected one bound for each of the {schedule.num_stages} stages. "
            f"Received: in_flight={bounds}"
        )
    held = [0.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for position, action, change in schedule.residual_changes(rank):
            held[action.stage] += change
            if held[action.stage] > bounds[action.stage]:
                why = (
                    f"stage {action.stage} would hold {held[action.stage]:g} micro-batches, "
                    f"its bound is {bounds[action.stage]}"
                )
                raise broken(rank, position, action, why)


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
            # The nearest receive moves least, so its message waits in memory for the shortest time.
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
