"""Orders that come from playing: each rank takes what it may whenever it is free."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tarantella_pp.schedule.actions import Compute, Kind

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
