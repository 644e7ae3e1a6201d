"""Schedules by playing the ranks with their real costs, each taking what a policy prefers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.runtime.schedule.actions import Compute, Kind
from tarantella_pp.runtime.schedule.costs import Costs


@dataclass(frozen=True)
class Policy:
    """What a free rank does next.

    Args:
        limits: The most micro-batches that each stage may hold, from F to the end of W.
        ahead: The most micro-batches that each stage may be ahead, from F to the end of B.
        fused: Whether B and W run together.
        forward_first: Whether F comes before B when both could run; else B comes first.
        deepest_first: Whether, of several F, that of the deepest stage comes first; else that of
            the oldest micro-batch.
        patience: A rank with only W to do waits instead if something better is known to become
            possible within so many times the seconds of W.
    """

    limits: tuple[int, ...]
    ahead: tuple[int, ...]
    fused: bool = False
    forward_first: bool = False
    deepest_first: bool = False
    patience: float = 0.0


class GreedyPlayer:
    """Plays all ranks of a chain of stages at once.

    Args:
        placement: Rank of each stage.
        num_micro_batches: Number of micro-batches.
        costs: Seconds of stages and messages; messages do not wait for each other here.
        policy: What a free rank does next.
    """

    def __init__(
        self, placement: Sequence[int], num_micro_batches: int, costs: Costs, policy: Policy
    ) -> None:
        num_stages, num_ranks = len(placement), 1 + max(placement)
        self.actions: list[list[Compute]] = [[] for _ in range(num_ranks)]
        self._placement, self._policy = placement, policy
        self._num_micro_batches = num_micro_batches
        self._costs = costs
        self._own: list[list[int]] = [[] for _ in range(num_ranks)]
        for stage, rank in enumerate(placement):
            self._own[rank].append(stage)
        # For each stage: how many F, B, W have begun, and when the inputs of the next are there.
        self._begun = {kind: [0] * num_stages for kind in "FBW"}
        self._inputs: dict[str, list[list[float]]] = {
            kind: [[] for _ in placement] for kind in "FB"
        }
        self._inputs["F"][0] = [0.0] * num_micro_batches
        self._queue: list[tuple[float, int]] = [(0.0, rank) for rank in range(num_ranks)]

    def play(self) -> float:
        """Plays until nothing is left to do; `actions` then has each rank's order.

        Returns:
            When the last rank is done, in seconds.
        """
        free = [0.0] * len(self._own)
        while self._queue:
            now, rank = heapq.heappop(self._queue)
            if now < free[rank]:
                continue
            action = self._choose(rank, now)
            if action is not None:
                free[rank] = self._begin(rank, action, now)
        return max(free)

    def _choose(self, rank: int, now: float) -> Compute | None:
        """Returns what `rank` does now, or None if it has to wait or wants to."""
        ready: list[Compute] = []
        soonest = math.inf
        for stage in self._own[rank]:
            for kind in ("F", "B"):
                time = self._possible_from(stage, kind)
                if time <= now:
                    ready.append(Compute(stage, kind, self._begun[kind][stage]))
                else:
                    soonest = min(soonest, time)
        if ready:
            return self._as_policy(min(ready, key=self._preference))
        for stage in self._own[rank]:
            index = self._begun["W"][stage]
            if index < self._begun["B"][stage]:
                wait = self._policy.patience * self._seconds(rank, stage, "W")
                return None if soonest < now + wait else Compute(stage, "W", index)
        return None

    def _as_policy(self, action: Compute) -> Compute:
        """Makes B a full backward where the policy wants it."""
        fused = self._policy.fused and action.kind == "B"
        return action._replace(kind="BW") if fused else action

    def _possible_from(self, stage: int, kind: Kind) -> float:
        """Returns from when on the stage's next F or B can run; infinity if that is not known."""
        index = self._begun[kind][stage]
        held = self._begun["F"][stage]
        if index == self._num_micro_batches:
            return math.inf
        if kind == "F":
            full = held - self._begun["W"][stage] >= self._policy.limits[stage]
            if full or held - self._begun["B"][stage] >= self._policy.ahead[stage]:
                return math.inf
        elif index >= held:
            return math.inf
        elif stage == len(self._placement) - 1:
            return 0.0
        inputs = self._inputs[kind][stage]
        return inputs[index] if index < len(inputs) else math.inf

    def _preference(self, action: Compute) -> tuple[bool, int, int]:
        """Returns the sort key of an action that could run: the smallest runs."""
        forward_last = (action.kind == "F") != self._policy.forward_first
        if self._policy.deepest_first:
            return (forward_last, -action.stage, action.micro_batch)
        return (forward_last, action.micro_batch, -action.stage)

    def _begin(self, rank: int, action: Compute, now: float) -> float:
        """Lets a rank run an action; returns when it ends."""
        end = now + self._seconds(rank, action.stage, action.kind)
        self.actions[rank].append(action)
        for part in action.kind:
            self._begun[part][action.stage] += 1
        heapq.heappush(self._queue, (end, rank))
        target = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= target < len(self._placement):
            arrival = end + self._transfer_seconds(action.stage, target)
            self._inputs[action.kind[0]][target].append(arrival)
            heapq.heappush(self._queue, (arrival, self._placement[target]))
        return end

    def _seconds(self, rank: int, stage: int, kind: Kind) -> float:
        """Returns the seconds of a computation on its rank."""
        return self._costs.stages[stage].seconds(kind) / self._costs.speed(rank)

    def _transfer_seconds(self, source: int, target: int) -> float:
        """Returns the seconds from the end of a computation to its message being there."""
        if self._placement[source] == self._placement[target]:
            return 0.0
        link = self._costs.link(source, target)
        overhead = self._costs.send_seconds + self._costs.receive_seconds
        return link.latency + link.seconds + overhead
