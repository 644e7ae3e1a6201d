"""Stages that share a rank: boundaries are moved until the largest rank has little to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Array, summed

IntArray = npt.NDArray[np.int64]
# The memory of stages, and what each may have.
Limits = tuple[Prices, Sequence[float]]

# Positions of a boundary that are tried at a time: those around it, and some of all others.
MOST_POSITIONS = 300
# Sets of boundaries up to which all of them are tried.
MOST_CHOICES = 200_000
# How much the largest stage, at least, and then cut bytes count besides the largest rank.
LEAST_BUBBLE_WEIGHT, LAST = 1e-2, 1e-4


def rank_totals(values: Sequence[float] | Array, ranks: Sequence[int]) -> Array:
    """Adds up the values of stages on each rank."""
    values = np.asarray(values, dtype=np.float64)
    return summed(ranks, values, 1 + max(ranks)) if ranks else values


def balance_ranks(
    prices: Prices,
    assignment: Sequence[int],
    ranks: Sequence[int],
    bubble_weight: float = 0.0,
    *,
    groups: Iterable[Iterable[int]] = (),
    limits: Limits | None = None,
) -> tuple[int, ...]:
    """Makes the largest rank small, beginning with stages whose largest is small.

    A step takes as long as the largest rank needs for all its stages, whatever each of them has,
    and stages that are as equal as layers allow add up to unequal ranks. Besides, every stage but
    the last must have had a turn before all ranks work, which takes longer the larger they are. The
    nodes are laid out in a line that keeps the stages, and its best boundaries are found: among all
    of them, or where these are too many by moving two at a time until nothing gets better. What is
    cut decides between equals.
    """
    weight = max(bubble_weight, LEAST_BUBBLE_WEIGHT)
    line = _Line(prices, assignment, ranks, weight, groups, limits)
    score, bounds = line.score(line.bounds), line.bounds
    if line.choices <= MOST_CHOICES:
        return line.assignment(min((score, bounds), line.best_of_all())[1])
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, len(ranks)), 2):
            best, better = line.best(bounds, i, j)
            if best < score * (1 - 1e-9):
                score, bounds, improved = best, better, True
    return line.assignment(bounds)


class _Line:
    """The nodes one behind the other, and what the stages between boundaries have."""

    def __init__(
        self,
        prices: Prices,
        assignment: Sequence[int],
        ranks: Sequence[int],
        bubble_weight: float,
        groups: Iterable[Iterable[int]],
        limits: Limits | None,
    ) -> None:
        stages = np.asarray(assignment)
        self._prices, self._limits = prices, limits
        self._ranks, self._bubble_weight = list(ranks), bubble_weight
        self._order: IntArray = np.argsort(stages, kind="stable")  # operations are in order
        self._place = np.argsort(self._order)
        counts = np.bincount(stages, minlength=len(ranks))
        self.bounds: list[int] = [0, *np.cumsum(counts).tolist()]
        self._sums = self._running(prices)
        self._memory = None if limits is None else self._running(limits[0])
        self._allowed, self._cut = self._allowed_positions(groups), self._cut_bytes()
        self._total = float(self._sums[0][-1] + prices.times.max() * self._sums[1][-1]) or 1.0

    def assignment(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Returns the stage of each node."""
        stages = np.searchsorted(bounds[1:], self._place, side="right")
        return tuple(stages.tolist())

    def score(self, bounds: Sequence[int]) -> float:
        """Returns how bad some boundaries are."""
        return float(self._scores([np.array(bound) for bound in bounds]))

    @property
    def choices(self) -> int:
        """Number of sets of boundaries."""
        return math.comb(len(self._allowed) - 2, len(self._ranks) - 1)

    def best_of_all(self) -> tuple[float, list[int]]:
        """Finds the best boundaries; returns their score, too."""
        inner, end = self._allowed[1:-1], self.bounds[-1]
        chosen = itertools.combinations(inner.tolist(), len(self._ranks) - 1)
        columns = np.array(list(chosen)).T
        scores = self._scores([np.array(0), *columns, np.array(end)])
        least = int(np.argmin(scores))
        return float(scores[least]), [0, *columns[:, least].tolist(), end]

    def best(self, bounds: Sequence[int], i: int, j: int) -> tuple[float, list[int]]:
        """Finds the best places of two boundaries, all others where they are."""
        first = self._positions(bounds[i - 1], bounds[j + 1 if j == i + 1 else i + 1], bounds[i])
        second = self._positions(bounds[i - 1 if j == i + 1 else j - 1], bounds[j + 1], bounds[j])
        tried = [np.array(bound) for bound in bounds]
        tried[i], tried[j] = first[:, None], second[None, :]
        scores = np.where(tried[i] < tried[j], self._scores(tried), np.inf)
        row, column = np.unravel_index(np.argmin(scores), scores.shape)
        better = list(bounds)
        better[i], better[j] = int(first[row]), int(second[column])
        return float(scores[row, column]), better

    def _scores(self, bounds: Sequence[IntArray]) -> Array:
        """Scores of boundaries, arrays that fit each other, or numbers."""
        totals: list[Array] = [np.zeros(())] * (1 + max(self._ranks))
        largest: Array = np.zeros(())
        too_much: Array = np.zeros(())
        for stage, ends in enumerate(itertools.pairwise(bounds)):
            value = _between(self._sums, self._prices.times[stage], *ends)
            totals[self._ranks[stage]] = totals[self._ranks[stage]] + value
            largest = np.maximum(largest, value)
            if self._limits is not None and self._memory is not None:
                memory = _between(self._memory, self._limits[0].times[stage], *ends)
                too_much = np.where(memory > self._limits[1][stage], np.inf, too_much)
        worst = np.maximum.reduce(np.broadcast_arrays(*totals))
        cut = sum((self._cut[bound] for bound in bounds[1:-1]), np.zeros(()))
        scores: Array = (
            (worst + self._bubble_weight * largest) / self._total + LAST * cut + too_much
        )
        return scores

    def _positions(self, low: int, high: int, now: int) -> IntArray:
        """Returns places between two others, those around a third one if there are too many."""
        free = self._allowed[(self._allowed > low) & (self._allowed < high)]
        if len(free) <= MOST_POSITIONS:
            return free
        nearest = free[np.argsort(np.abs(free - now), kind="stable")[: MOST_POSITIONS // 2]]
        spread = free[np.linspace(0, len(free) - 1, MOST_POSITIONS // 2).astype(np.int64)]
        return np.union1d(nearest, spread)

    def _running(self, prices: Prices) -> tuple[Array, Array]:
        """Returns sums up to each place of the line, of both parts of prices."""
        once, each = (
            np.concatenate([[0.0], np.cumsum(weights[self._order])])
            for weights in (prices.once, prices.each)
        )
        return once, each

    def _allowed_positions(self, groups: Iterable[Iterable[int]]) -> IntArray:
        """Returns the places that part no nodes that have to stay together."""
        inside = np.zeros(len(self._order) + 1, np.int64)
        for group in groups:
            places = self._place[list(group)]
            inside[places.min() + 1] += 1
            inside[places.max() + 1] -= 1
        return np.flatnonzero(np.cumsum(inside) == 0)

    def _cut_bytes(self) -> Array:
        """Returns the share of all bytes that travel across each place."""
        across = np.zeros(len(self._order) + 1)
        for nodes, size in self._prices.wires:
            places = self._place[list(nodes)]
            across[places.min() + 1] += size
            across[places.max() + 1] -= size
        everything = sum(size for _, size in self._prices.wires) or 1.0
        shares: Array = np.cumsum(across) / everything
        return shares


def _between(sums: tuple[Array, Array], times: float, low: IntArray, high: IntArray) -> Array:
    """Returns what lies between two places, or arrays of places that fit each other."""
    once, each = sums
    found: Array = once[high] - once[low] + times * (each[high] - each[low])
    return found
