"""Stages that share a rank: boundaries are moved until the largest rank has little to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.cut import Limits, Prices
from tarantella_pp.partition.graph.ideals import Array, summed

IntArray = npt.NDArray[np.int64]
# Places of a boundary that are tried at a time: the nearest ones, and some of all others.
MOST_PLACES = 300
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
    order = np.argsort(assignment, kind="stable")  # operations are in order
    place = np.argsort(order)
    line = _Line(prices, order, ranks, max(bubble_weight, LEAST_BUBBLE_WEIGHT), limits)
    free = _places_between(place, groups)
    bounds = [0, *np.cumsum(np.bincount(assignment, minlength=len(ranks))).tolist()]
    score = float(line.scores([np.array(bound) for bound in bounds]))
    moved = range(1, len(ranks))
    if math.comb(len(free), len(moved)) <= MOST_CHOICES:
        tried = [*np.array([*itertools.combinations(free.tolist(), len(moved))]).T]
        scores = line.scores([np.array(0), *tried, np.array(len(order))])
        least = int(np.argmin(scores))
        if scores[least] < score:
            bounds = [0, *(int(column[least]) for column in tried), len(order)]
        moved = range(0)
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(moved, 2):
            found = line.best_pair(bounds, i, j, free)
            if found[0] < score * (1 - 1e-9):
                (score, bounds), improved = found, True
    return tuple(np.searchsorted(bounds[1:], place, side="right").tolist())


def _places_between(place: IntArray, groups: Iterable[Iterable[int]]) -> IntArray:
    """Returns the places inside a line that part no nodes that have to stay together."""
    inside = np.zeros(len(place) + 1, np.int64)
    for group in groups:
        places = place[list(group)]
        inside[places.min() + 1] += 1
        inside[places.max() + 1] -= 1
    return np.flatnonzero(np.cumsum(inside) == 0)[1:-1]


def _places_around(free: IntArray, low: int, now: int, high: int) -> IntArray:
    """Returns places between two others: of too many the nearest ones, and some of all."""
    free = free[(free > low) & (free < high)]
    if len(free) <= MOST_PLACES:
        return free
    nearest = free[np.argsort(np.abs(free - now), kind="stable")[: MOST_PLACES // 2]]
    spread = free[np.linspace(0, len(free) - 1, MOST_PLACES // 2).astype(np.int64)]
    return np.union1d(nearest, spread)


class _Line:
    """The nodes one behind the other, and what the stages between boundaries have."""

    def __init__(
        self,
        prices: Prices,
        order: IntArray,
        ranks: Sequence[int],
        bubble_weight: float,
        limits: Limits | None,
    ) -> None:
        self._ranks, self._bubble_weight = ranks, bubble_weight
        self._prices, self._limits = _running(prices, order), None
        if limits is not None:
            self._limits = _running(limits[0], order), limits[1]
        place, across = np.argsort(order), np.zeros(len(order) + 1)
        for nodes, size in prices.wires:
            places = place[list(nodes)]
            across[places.min() + 1] += size
            across[places.max() + 1] -= size
        everything = sum(size for _, size in prices.wires) or 1.0
        self._cut = np.cumsum(across) / everything  # share of all bytes that cross each place
        self._total = float(self._prices[:, -1].max()) or 1.0

    def scores(self, bounds: Sequence[IntArray]) -> Array:
        """Scores of boundaries, arrays that fit each other, or numbers."""
        totals: list[Array] = [np.zeros(())] * (1 + max(self._ranks))
        largest: Array = np.zeros(())
        too_much: Array = np.zeros(())
        for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
            value = self._prices[stage, end] - self._prices[stage, begin]
            totals[self._ranks[stage]] = totals[self._ranks[stage]] + value
            largest = np.maximum(largest, value)
            if self._limits is not None:
                memory, most = self._limits
                above = memory[stage, end] - memory[stage, begin] > most[stage]
                too_much = np.where(above, np.inf, too_much)
        worst = np.maximum.reduce(np.broadcast_arrays(*totals))
        cut = sum((self._cut[bound] for bound in bounds[1:-1]), np.zeros(()))
        score: Array = (worst + self._bubble_weight * largest) / self._total
        return score + LAST * cut + too_much

    def best_pair(
        self, bounds: Sequence[int], i: int, j: int, free: IntArray
    ) -> tuple[float, list[int]]:
        """Finds the best places of two boundaries, all others where they are."""
        near = j == i + 1
        first = _places_around(free, bounds[i - 1], bounds[i], bounds[j + 1 if near else i + 1])
        second = _places_around(free, bounds[i - 1 if near else j - 1], bounds[j], bounds[j + 1])
        tried = [np.array(bound) for bound in bounds]
        tried[i], tried[j] = first[:, None], second[None, :]
        scores = np.where(tried[i] < tried[j], self.scores(tried), np.inf)
        row, column = np.unravel_index(np.argmin(scores), scores.shape)
        better = list(bounds)
        better[i], better[j] = int(first[row]), int(second[column])
        return float(scores[row, column]), better


def _running(prices: Prices, order: IntArray) -> Array:
    """Returns what stages cost that begin with the line and end at each place, a row for each."""
    once, each = (
        np.concatenate([[0.0], np.cumsum(weights[order])]) for weights in (prices.once, prices.each)
    )
    found: Array = once + prices.times[:, None] * each
    return found
