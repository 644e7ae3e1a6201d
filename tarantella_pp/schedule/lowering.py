"""From computations to messages and reductions, and the six laws that hold for all of them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.players import Replay
from tarantella_pp.schedule.schedule import (
    Action,
    Compute,
    Direction,
    Kind,
    Link,
    Operation,
    Reduce,
    Schedule,
    Transfer,
)

_KINDS: tuple[Kind, ...] = ("F", "R", "B", "W")


def check_links(
    num_stages: int, links: Iterable[Link] | None, gradient_links: Iterable[Link] | None
) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Returns links and gradient links, checked, sorted and each once, with their defaults."""
    if links is None:
        links = [(stage, stage + 1) for stage in range(num_stages - 1)]
    forward = tuple(sorted(set(links)))
    for source, target in forward:
        if not 0 <= source < target < num_stages:
            raise ScheduleError(
                f"Expected links from a stage to a later one, of stages 0 to {num_stages - 1}. "
                f"Received: links with {source}>{target}"
            )
    backward = forward if gradient_links is None else tuple(sorted(set(gradient_links)))
    for source, target in backward:
        if (source, target) not in forward:
            raise ScheduleError(
                "Expected gradients to flow over links that carry activations. Received: "
                f"gradient_links with {source}>{target}, links={forward}"
            )
    return forward, backward


# By kind and stage of computations, the links of messages that these need, or make; sender first.
Routes: TypeAlias = defaultdict[tuple[str, int], list[Link]]


def _routes(links: Iterable[Link], gradient_links: Sequence[Link]) -> tuple[Routes, Routes]:
    """Returns the messages that computations need, and those that they make; R and W have none."""
    needed, made = Routes(list), Routes(list)
    backward = [("B", target, source) for source, target in reversed(gradient_links)]
    for kind, source, target in [*(("F", *link) for link in links), *backward]:
        needed[kind, target].append((source, target))
        made[kind, source].append((source, target))
    return needed, made


def reductions(placement: Sequence[int], buckets: Sequence[int], rank: int) -> tuple[Reduce, ...]:
    """Returns the reductions of a rank in the order in which every replica starts them."""
    own = [(stage, count) for stage, count in enumerate(buckets) if placement[stage] == rank]
    # The last stage is through its backward passes first.
    return tuple(Reduce(stage, bucket) for stage, count in own[::-1] for bucket in range(count))


def validate(schedule: Schedule, in_flight: Sequence[int] | None = None) -> None:
    """Checks a lowered schedule against the six laws, over all ranks.

    The order of a schedule may come from a formula, a search or a text file; these laws hold it to
    what training needs, before the first step. 1 and 2 keep the numbers right, 3 and 4 keep ranks
    from waiting for ever, 5 bounds memory, 6 keeps replicas in step.

    1. Each stage runs forward and backward of each micro-batch exactly once, on its own rank; in
       between it may repeat the forward, once.
    2. A computation comes after all that it depends on: a forward after the forwards that feed
       it, an input gradient after its own forward, repeated or not, and the input gradients of
       the stages it feeds, a weight gradient after its input gradient.
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
    _check_each_once(schedule, forward, backward)
    needed, _ = _routes(forward, backward)
    for rank in range(schedule.num_ranks):
        _check_order(schedule, rank, needed)
    _check_deadlock(schedule)
    if in_flight is None:
        return
    held = schedule.held
    if len(in_flight) != len(held) or any(map(operator.gt, held, in_flight)):
        raise ScheduleError(
            f"Expected stages to hold no more micro-batches than declared; they hold "
            f"{', '.join(map(str, held))}. Received: in_flight={in_flight}"
        )


def _check_each_once(
    schedule: Schedule, links: Iterable[Link], gradient_links: Iterable[Link]
) -> None:
    """Checks laws 1 and 3: each computation and each end of a message once, on its own rank."""
    owners = _owners(schedule, links, gradient_links)
    seen: set[Compute | Transfer] = set()
    for rank, own in enumerate(schedule.actions):
        for position, action in enumerate(own):
            for part in parts_of(action):
                if part not in owners:
                    size = f"{schedule.num_stages} stages, {schedule.num_micro_batches}"
                    why = f"there is no such action of {size} micro-batches and these links"
                    raise broken(rank, position, action, why)
                if owners[part] != rank:
                    raise broken(rank, position, action, f"it belongs to rank {owners[part]}")
                if part in seen:
                    raise broken(rank, position, action, f"{part} is there already")
                seen.add(part)
    for part, rank in owners.items():
        if part not in seen and not (isinstance(part, Compute) and part.kind == "R"):
            raise ScheduleError(f"Rank {rank}: {part} is missing")


def _owners(
    schedule: Schedule, links: Iterable[Link], gradient_links: Iterable[Link]
) -> dict[Compute | Transfer, int]:
    """Returns all that there should be, or R, and on which rank; BW is both of B and W."""
    where, micro_batches = schedule.placement, range(schedule.num_micro_batches)
    kinds = _KINDS if schedule.has_backward else _KINDS[:1]
    found: dict[Compute | Transfer, int] = {
        Compute(stage, kind, i): rank
        for stage, rank in enumerate(where)
        for kind in kinds
        for i in micro_batches
    }
    messages: list[tuple[int, int, Direction]] = [(*link, "F") for link in links]
    messages += [(target, source, "B") for source, target in gradient_links if "B" in kinds]
    for source, target, direction in messages:
        for i in micro_batches if where[source] != where[target] else ():
            found[Transfer(source, target, "S", direction, i)] = where[source]
            found[Transfer(source, target, "R", direction, i)] = where[target]
    return found


def parts_of(action: Action) -> list[Compute | Transfer]:
    """Returns what an action does, B and W taken apart; a reduction is none of it."""
    if isinstance(action, Compute):
        stage, both, i = action
        return [Compute(stage, kind, i) for kind in _KINDS if kind in both]
    return [action] if isinstance(action, Transfer) else []


def broken(rank: int, position: int, action: Action, why: str) -> ScheduleError:
    """Makes the error that names an action and its fault."""
    return ScheduleError(f"Rank {rank}, position {position}, {action}: {why}")


def _check_order(schedule: Schedule, rank: int, messages: Routes) -> None:
    """Checks laws 2 and 6 on one rank: what an action depends on comes before it."""
    done: set[Compute | Transfer] = set()
    left = list(reductions(schedule.placement, schedule.buckets, rank))
    for position, action in enumerate(schedule.actions[rank]):
        if isinstance(action, Reduce):
            if left[:1] != [action]:
                why = f"{left[0] if left else 'none'} is the next reduction of this rank"
                raise broken(rank, position, action, why)
            left.pop(0)
        for needed in _needed(schedule, action, messages):
            if needed not in done:
                raise broken(rank, position, action, f"{needed} comes after it")
        done.update(parts_of(action))
    if left:
        raise ScheduleError(f"Rank {rank}: {left[0]} is missing; other replicas wait for it")


def _needed(schedule: Schedule, action: Action, messages: Routes) -> Iterator[Compute | Transfer]:
    if isinstance(action, Reduce):
        for i in range(schedule.num_micro_batches):
            yield Compute(action.stage, "W", i)
    elif isinstance(action, Transfer):
        if action.operation == "S":
            yield Compute(action.source, action.direction, action.micro_batch)
    else:
        stage, kind, i = action
        # W needs the output gradients that B has received, so it comes after its own B.
        if kind != "F":
            yield Compute(stage, "B" if kind == "W" else "F", i)
        if kind in ("B", "BW") and (stage, i) in schedule.repeated:
            yield Compute(stage, "R", i)
        where, direction = schedule.placement, _direction(action)
        for source, target in messages[kind[0], stage]:
            local = where[source] == where[target]
            message = Transfer(source, target, "R", direction, i)
            yield Compute(source, direction, i) if local else message


def _check_deadlock(schedule: Schedule) -> None:
    """Checks the fourth law by playing all ranks with sends that block."""
    replay = Replay(schedule.actions, blocking=True)
    waits = []
    for rank in replay.run():
        position = replay.position[rank]
        action = replay.programs[rank][position]
        if isinstance(action, Transfer):
            stage = action.target if action.operation == "S" else action.source
            peer = schedule.placement[stage]
            waits.append(f"rank {rank} at position {position}, {action}, for rank {peer}")
    if waits:
        raise ScheduleError(f"Deadlock if sends block: {'; '.join(waits)}")


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
    if any(buckets) and not schedule.has_backward:
        raise ScheduleError(
            f"The schedule '{schedule.name}' has no backward passes, so no gradients to sum. "
            f"Received: buckets={tuple(buckets)}"
        )
    schedule = replace(schedule, buckets=tuple(buckets))
    forward, backward = check_links(schedule.num_stages, links, gradient_links)
    _check_each_once(schedule, (), ())
    routes = _routes(forward, backward)
    programs = [_program(schedule, rank, *routes) for rank in range(schedule.num_ranks)]
    if blocking:
        replay = Replay(programs, blocking=True)
        while stuck := replay.run():
            _unblock(replay, stuck, schedule.placement)
        programs = replay.programs
    actions = tuple(map(tuple, programs))
    return replace(schedule, actions=actions, links=forward, gradient_links=backward)


def _program(schedule: Schedule, rank: int, needed: Routes, made: Routes) -> list[Action]:
    """Returns the actions of one rank with receives before and sends behind computations."""
    program: list[Action] = []
    own = [action for action in schedule.actions[rank] if isinstance(action, Compute)]
    # Each reduction starts as soon as its stage has its last weight gradient and those before it
    # have started.
    ends = {a.stage: position for position, a in enumerate(own) if a.kind in ("W", "BW")}
    left = list(reductions(schedule.placement, schedule.buckets, rank))
    for position, action in enumerate(own):
        key = action.kind[0], action.stage
        program += _transfers(action, needed[key], "R", schedule.placement)
        program.append(action)
        program += _transfers(action, made[key], "S", schedule.placement)
        while left and ends[left[0].stage] <= position:
            program.append(left.pop(0))
    return program


def _transfers(
    action: Compute, pairs: Iterable[Link], operation: Operation, placement: Sequence[int]
) -> list[Transfer]:
    """Returns one end of the messages of a computation that cross ranks."""
    return [
        Transfer(source, target, operation, _direction(action), action.micro_batch)
        for source, target in pairs
        if placement[source] != placement[target]
    ]


def _direction(action: Compute) -> Direction:
    return "F" if action.kind == "F" else "B"


def _unblock(replay: Replay, stuck: Iterable[int], placement: Sequence[int]) -> None:
    """Moves up the nearest receive of a send at which ranks are stuck, which always helps."""
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
