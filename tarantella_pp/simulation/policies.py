"""What a free rank does next, by rules that a search can vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.schedule.actions import Compute, Kind
from tarantella_pp.schedule.list_scheduling import ListScheduler
from tarantella_pp.simulation.costs import Costs

ROUNDING = 1e-9
"""Micro-batches by which a limit may seem to be exceeded, where shares of them are added up."""


@dataclass(frozen=True)
class Policy:
    """What a free rank does next."""

    limits: tuple[float, ...]
    ahead: tuple[int, ...]
    fused: bool = False
    forward_first: bool = False
    deepest_first: bool = False
    patience: float = 0.0


class PolicyScheduler(ListScheduler):
    """Plays all ranks of a chain of stages with real costs, each taking what a policy prefers."""

    def __init__(
        self, placement: Sequence[int], num_micro_batches: int, costs: Costs, policy: Policy
    ) -> None:
        super().__init__(placement, num_micro_batches)
        self._costs, self._policy = costs, policy
        self._shares = [stage.waiting_share for stage in costs.stages]
        self._stages: list[list[int]] = [[] for _ in range(1 + max(placement))]
        for stage, rank in enumerate(placement):
            self._stages[rank].append(stage)
        self._begun = {kind: [0] * len(placement) for kind in "FBW"}

    def longest_rank(self) -> float:
        """Returns the most seconds of a rank from its first to its last computation.

        Steps in a row take no longer: each may begin so much later than the one before.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for turn in self.turns:
            first.setdefault(turn.rank, turn.start)
            last[turn.rank] = turn.end
        return max(last[rank] - first[rank] for rank in first)

    def choose(self, rank: int, now: float) -> Compute | None:
        """Returns what `rank` does now, or None if it has to wait or wants to."""
        action = self._preferred(rank, now)
        if action is not None:
            for part in action.kind:
                self._begun[part][action.stage] += 1
        return action

    def seconds(self, action: Compute) -> float:
        """Returns the seconds of a computation."""
        return self._costs.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, source: int, target: int) -> float:
        """Returns the seconds from the end of a computation to its message being there."""
        if self.placement[source] == self.placement[target]:
            return 0.0
        link = self._costs.link(source, target)
        overhead = self._costs.send_seconds + self._costs.receive_seconds
        return link.latency + link.seconds + overhead

    def _preferred(self, rank: int, now: float) -> Compute | None:
        """Returns the best F or B that can run now, else a W unless it is worth waiting."""
        ready: list[Compute] = []
        soonest = math.inf
        for stage in self._stages[rank]:
            for kind in ("F", "B"):
                time = self._possible_from(stage, kind)
                if time <= now:
                    ready.append(Compute(stage, kind, self._begun[kind][stage]))
                else:
                    soonest = min(soonest, time)
        if ready:
            return self._as_policy(min(ready, key=self._preference))
        for stage in self._stages[rank]:
            index = self._begun["W"][stage]
            if index < self._begun["B"][stage]:
                action = Compute(stage, "W", index)
                wait = self._policy.patience * self.seconds(action)
                return None if soonest < now + wait else action
        return None

    def _as_policy(self, action: Compute) -> Compute:
        """Makes B a full backward where the policy wants it."""
        fused = self._policy.fused and action.kind == "B"
        return action._replace(kind="BW") if fused else action

    def _possible_from(self, stage: int, kind: Kind) -> float:
        """Returns from when on the stage's next F or B can run; infinity if that is not known."""
        index = self._begun[kind][stage]
        held = self._begun["F"][stage]
        if kind == "F":
            ahead = held - self._begun["B"][stage]
            waiting = self._begun["B"][stage] - self._begun["W"][stage]
            after = ahead + 1 + self._shares[stage] * waiting
            if after > self._policy.limits[stage] + ROUNDING or ahead >= self._policy.ahead[stage]:
                return math.inf
        elif index >= held:
            return math.inf
        return self.arrivals[kind][stage].get(index, math.inf)

    def _preference(self, action: Compute) -> tuple[bool, int, int]:
        """Returns the sort key of an action that could run: the smallest runs."""
        forward_last = (action.kind == "F") != self._policy.forward_first
        if self._policy.deepest_first:
            return (forward_last, -action.stage, action.micro_batch)
        return (forward_last, action.micro_batch, -action.stage)
