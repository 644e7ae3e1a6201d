"""One step of a pipeline as plain rows: which rank computes what, from when to when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.pictures.palette import KINDS
from tarantella_pp.simulation.timeline import idle_fraction


class Bar(NamedTuple):
    """One computation.

    Attributes:
        rank: The rank that computes.
        start: When it begins, since the step began.
        end: When it ends.
        label: What it is, e.g. `"F3"`, or `"2F3"` where the rank has several stages.
        kind: `"F"`, `"B"`, `"W"` or `"BW"`.
    """

    rank: int
    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class StepBars:
    """The computations of one step, to be drawn.

    Attributes:
        name: Name of the schedule.
        rank_names: What to call each rank, e.g. `"rank 0 (stage 0)"`.
        bars: The computations, in any order.
        in_seconds: Whether times are seconds; otherwise only their ratios mean something.
        note: Where the times come from, in a sentence.

    Raises:
        PlanError: A bar is of an unknown rank or kind, or its times are not finite, in order and
            not negative.
    """

    name: str
    rank_names: tuple[str, ...]
    bars: tuple[Bar, ...]
    in_seconds: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        if not self.rank_names:
            raise PlanError("Expected the names of the ranks. Received: rank_names=()")
        for bar in self.bars:
            times = 0 <= bar.start <= bar.end < math.inf
            if not (times and 0 <= bar.rank < len(self.rank_names) and bar.kind in KINDS):
                raise PlanError(
                    f"Expected a computation of kind {', '.join(KINDS)} on a rank from 0 to "
                    f"{len(self.rank_names) - 1}, with finite times in order. Received: {bar}"
                )

    @cached_property
    def length(self) -> float:
        """How long the step takes."""
        return max((bar.end for bar in self.bars), default=0.0)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank does not compute."""
        return tuple(idle_fraction([busy], self.length) for busy in self._busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return idle_fraction(self._busy, self.length)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of computations that occur."""
        found = {bar.kind for bar in self.bars}
        return tuple(kind for kind in KINDS if kind in found)

    def of_rank(self, rank: int) -> tuple[Bar, ...]:
        """Returns the computations of a rank, in order.

        Args:
            rank: The rank.
        """
        return self._by_rank[rank]

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(sum(bar.end - bar.start for bar in own) for own in self._by_rank)

    @cached_property
    def _by_rank(self) -> tuple[tuple[Bar, ...], ...]:
        own: list[list[Bar]] = [[] for _ in self.rank_names]
        for bar in sorted(self.bars):
            own[bar.rank].append(bar)
        return tuple(map(tuple, own))
