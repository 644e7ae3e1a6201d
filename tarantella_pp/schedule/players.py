"""All ranks play a step: through lists that are given, or choosing what comes next by a clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tarantella_pp.schedule.schedule import Action, Compute, Kind, Message, Transfer

Orders: TypeAlias = tuple[tuple[Compute, ...], ...]
Preference: TypeAlias = Callable[[Compute], tuple[Any, ...]]

_UNITS: dict[Kind, int] = {"F": 1, "R": 1, "B": 1, "W": 1, "BW": 2}
# What a rank takes first; which is best depends on the numbers of ranks, stages and micro-batches.
_PREFERENCES: tuple[Preference, ...] = (
    lambda action: (action.kind == "F", action.micro_batch, -action.stage),
    lambda action: (action.kind == "F", action.stage if action.kind == "F" else -action.stage),
    lambda action: (action.kind != "F", action.micro_batch, -action.stage),
    lambda action: (action.kind != "F", -action.stage),
)


class Replay:
    """Plays the actions of all ranks; the one place that knows what they mean to each other.

    The communication between two computations of a rank is one exchange; its receives are posted
    when the rank enters it::

        0F0   0>1SF0 1>0RB0   0BW0   0>1SF1 ...
              `-- exchange -'
              1>0RB0 is posted here, before the send is reached

    The lists say who comes next, so no clock is needed: each rank goes as far as it can, and goes
    on when what it waits for has come. (`ListScheduler` plays ranks that have to choose.)

    * With sends that block, as MPI's large ones may, a send waits until its receive is posted,
      and a receive waits where it stands until its send is reached. Lists that get through so
      get through with any kind of send.
    * Otherwise, as in the runtime, sends go on by themselves, and a receive is waited for by the
      computation that needs it.
    * A reduction only starts where it stands, so it never waits.
    """

    def __init__(self, programs: Sequence[Sequence[Action]], *, blocking: bool) -> None:
        self.programs = [list(program) for program in programs]
        self.position = [0] * len(programs)
        self.blocking = blocking
        self._posted: set[Message] = set()
        self._sent: set[Message] = set()
        self._expected: dict[tuple[int, str, int], list[Transfer]] = {}
        self._waiting: dict[Message, int] = {}
        self._runnable = list(range(len(programs)))
        for rank in range(len(programs)):
            self._enter_exchange(rank)

    def run(self) -> list[int]:
        """Lets every rank go as far as it can."""
        while self._runnable:
            self._walk(self._runnable.pop())
        return [rank for rank, own in enumerate(self.programs) if self.position[rank] < len(own)]

    def hoist(self, receive: Transfer, rank: int) -> None:
        """Moves a receive of a stuck rank forward, to the end of the exchange it is stuck in."""
        program = self.programs[rank]
        # Behind the sends that block, yet in the same exchange: its receives are posted when the
        # rank enters it, so the sender of this one can go on.
        old = program.index(receive, self.position[rank])
        new = self.position[rank]
        while not isinstance(program[new], Compute):
            new += 1
        program.insert(new, program.pop(old))
        self._post(receive)

    def compute(self, rank: int, action: Compute) -> None:
        """Is called for each computation; a replay with a clock adds its time."""

    def send(self, rank: int, action: Transfer) -> None:
        """Is called when a send gets through."""

    def receive(self, rank: int, action: Transfer) -> None:
        """Is called when a receive gets through."""

    def _walk(self, rank: int) -> None:
        """Lets one rank go as far as it can, and notes for what it waits then."""
        program = self.programs[rank]
        while self.position[rank] < len(program):
            action = program[self.position[rank]]
            if (missing := self._missing(action)) is not None:
                self._waiting[missing] = rank
                return
            self.position[rank] += 1
            if isinstance(action, Compute):
                # In the runtime a receive is waited for here, not where it was posted.
                for receive in self._expected.pop(_key(action), ()):
                    self.receive(rank, receive)
                self.compute(rank, action)
                self._enter_exchange(rank)
            elif isinstance(action, Transfer):
                self._transfer(rank, action)

    def _transfer(self, rank: int, action: Transfer) -> None:
        if action.operation == "S":
            self.send(rank, action)
            self._sent.add(action.message)
            self._wake(action.message)
        elif self.blocking:
            self.receive(rank, action)
        else:
            key = (action.target, action.direction, action.micro_batch)
            self._expected.setdefault(key, []).append(action)

    def _missing(self, action: Action) -> Message | None:
        """Returns a message for which `action` has to wait, or None."""
        if isinstance(action, Compute):
            for receive in self._expected.get(_key(action), ()):
                if receive.message not in self._sent:
                    return receive.message
        elif isinstance(action, Transfer) and self.blocking:
            # A blocking send ends when its receive is posted, a receive when its send is reached.
            ready = self._posted if action.operation == "S" else self._sent
            if action.message not in ready:
                return action.message
        return None

    def _enter_exchange(self, rank: int) -> None:
        """Posts the receives up to the next computation."""
        program = self.programs[rank]
        for index in range(self.position[rank], len(program)):
            action = program[index]
            if isinstance(action, Compute):
                return
            if isinstance(action, Transfer) and action.operation == "R":
                self._post(action)

    def _post(self, receive: Transfer) -> None:
        self._posted.add(receive.message)
        self._wake(receive.message)

    def _wake(self, message: Message) -> None:
        """Lets the rank go on that waits for a message, if there is one."""
        if (rank := self._waiting.pop(message, None)) is not None:
            self._runnable.append(rank)


def _key(action: Compute) -> tuple[int, str, int]:
    return (action.stage, action.kind[0], action.micro_batch)


class ListScheduler:
    """Plays all ranks of a chain of stages by the clock; the one event loop that has to choose.

    Whenever a rank is free, or a message reaches a free rank, it is asked what it does next. What
    each of them answers is the order of its computations::

        time   0         1         2         3
        rank 0 choose F0 choose F1 choose -> nothing yet, asked again when the gradient arrives
        rank 1 -> none   choose F0 choose B0 ...

    `Replay` is the other way to play: of orders that are given, where no clock is needed to say
    who comes next.
    """

    def __init__(self, placement: Sequence[int], num_micro_batches: int) -> None:
        self.placement = placement
        self._taken: list[list[Compute]] = [[] for _ in range(1 + max(placement))]  # by each rank
        there = dict.fromkeys(range(num_micro_batches), 0.0)
        # When what each F, or B, needs of other stages is there; by stage, then by micro-batch.
        self.arrivals: dict[str, list[dict[int, float]]] = {
            kind: [{} for _ in placement] for kind in "FB"
        }
        self.arrivals["F"][0] = self.arrivals["B"][-1] = there

    def choose(self, rank: int, now: float) -> Compute | None:
        """Returns what a free rank does now, or None if it waits; to be overridden."""
        raise NotImplementedError

    def arrival(self, action: Compute) -> float:
        """Returns when what a computation needs of other stages is there; R, W need nothing."""
        if action.kind in ("R", "W"):
            return 0.0
        return self.arrivals[action.kind[0]][action.stage].get(action.micro_batch, math.inf)

    def seconds(self, action: Compute) -> float:
        """Returns how long a computation takes."""
        return _UNITS[action.kind]

    def transfer_seconds(self, source: int, target: int) -> float:
        """Returns how long a message from one stage to another takes."""
        return 0.0

    def play(self) -> float:
        """Plays until no rank has anything to do; returns when the last one is done."""
        free = [0.0] * len(self._taken)
        queue = [(0.0, rank) for rank in range(len(free))]
        while queue:
            now, rank = heapq.heappop(queue)
            # A message may wake a rank that computes: it looks again when it is free.
            action = None if now < free[rank] else self.choose(rank, now)
            if action is None:
                continue
            free[rank] = end = now + self.seconds(action)
            self._taken[rank].append(action)
            heapq.heappush(queue, (end, rank))
            target = action.stage + (1 if action.kind == "F" else -1)
            if action.kind not in ("R", "W") and 0 <= target < len(self.placement):
                arrival = end + self.transfer_seconds(action.stage, target)
                self.arrivals[action.kind[0]][target][action.micro_batch] = arrival
                heapq.heappush(queue, (arrival, self.placement[target]))
        return max(free)

    def orders(self) -> Orders:
        """Returns the computations of each rank in the order in which it took them."""
        return tuple(map(tuple, self._taken))


class _InOrder(ListScheduler):
    """Plays ranks that take from the orders of their stages what they prefer."""

    def __init__(
        self,
        orders: Sequence[Sequence[Compute]],
        placement: Sequence[int],
        num_micro_batches: int,
        preference: Preference,
    ) -> None:
        super().__init__(placement, num_micro_batches)
        self._preference = preference
        self._queues: list[list[list[Compute]]] = [[] for _ in range(1 + max(placement))]
        for rank, order in zip(placement, orders, strict=True):
            self._queues[rank].append(list(order)[::-1])

    def choose(self, rank: int, now: float) -> Compute | None:
        """Takes the preferred of the queues whose next computation has its inputs."""
        ready = [queue for queue in self._queues[rank] if queue and self.arrival(queue[-1]) <= now]
        return min(ready, key=lambda queue: self._preference(queue[-1])).pop() if ready else None


def merge(
    orders: Sequence[Sequence[Compute]], placement: Sequence[int], num_micro_batches: int
) -> Orders:
    """Interleaves the orders of the stages that share a rank; each stage keeps its own."""
    if len(set(placement)) == len(placement):
        return tuple(tuple(orders[placement.index(rank)]) for rank in range(len(placement)))
    # No single preference is best for all shapes; to play all four takes less than to find out
    # which.
    players = [_InOrder(orders, placement, num_micro_batches, one) for one in _PREFERENCES]
    return min(players, key=ListScheduler.play).orders()


class GapFiller(ListScheduler):
    """Plays ranks with F and B in order; W fills gaps, and makes room for F within limits."""

    def __init__(
        self,
        orders: Sequence[Sequence[Compute]],
        limits: Sequence[int],
        placement: Sequence[int],
        num_micro_batches: int,
    ) -> None:
        super().__init__(placement, num_micro_batches)
        self._queues = [list(order)[::-1] for order in orders]
        self._late: list[list[Compute]] = [[] for _ in orders]
        self._room = list(limits)  # for how many micro-batches each stage has memory left

    def choose(self, rank: int, now: float) -> Compute | None:
        """Takes the next F or B if that can run, else the first W that was put off."""
        queue, late = self._queues[rank], self._late[rank]
        if queue and self.arrival(queue[-1]) <= now:
            action = queue[-1]
            if action.kind == "B":
                late.append(action._replace(kind="W"))
                return queue.pop()
            if self._room[action.stage]:
                self._room[action.stage] -= 1
                return queue.pop()
        if not late:
            return None
        self._room[late[0].stage] += 1
        return late.pop(0)
