"""Stages that share a rank: boundaries are moved until the largest rank has little to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Array, summed

# Places around a boundary that are tried at a time, on either side.
PLACES = 150
# How much the largest stage counts besides the largest rank, at least.
STAGE_WEIGHT = 1e-2


def rank_totals(values: Sequence[float] | Array, ranks: Sequence[int]) -> Array:
    """Adds up the values of stages on each rank."""
    values = np.asarray(values, dtype=np.float64)
    return summed(ranks, values, 1 + max(ranks)) if ranks else values


def balance_ranks(
    prices: Prices,
    assignment: Sequence[int],
    ranks: Sequence[int],
    groups: Iterable[Iterable[int]] = (),
    weight: float = 0.0,
) -> tuple[int, ...]:
    """Makes the largest rank small, beginning with stages whose largest is small.

    Stages that are as equal as layers allow add up to unequal ranks. By `weight` the largest stage
    counts besides, for which others wait while the pipeline fills. The nodes are laid out in a
    line that keeps the stages, and two boundaries at a time are moved to the best of the places
    around them, until nothing gets better.
    """
    order = np.argsort(assignment, kind="stable")  # operations are in order
    place = np.argsort(order)
    running = _running(prices, order)
    free = _places_between(place, groups)
    bounds = [0, *np.cumsum(np.bincount(assignment, minlength=len(ranks))).tolist()]
    score, better = float(_score(running, [np.array(b) for b in bounds], ranks, weight)), bounds
    while better:
        bounds, better = better, []
        for i, j in itertools.combinations(range(1, len(ranks)), 2):
            tried = [np.array(bound) for bound in bounds]
            tried[i], tried[j] = _near(free, bounds[i])[:, None], _near(free, bounds[j])[None, :]
            ordered = [begin < end for begin, end in itertools.pairwise(tried)]
            legal = np.logical_and.reduce(np.broadcast_arrays(*ordered))
            scores = np.where(legal, _score(running, tried, ranks, weight), np.inf)
            row, column = np.unravel_index(np.argmin(scores), scores.shape)
            if scores[row, column] < score * (1 - 1e-9):
                score, better = float(scores[row, column]), [*bounds]
                better[i], better[j] = int(tried[i][row, 0]), int(tried[j][0, column])
    return tuple(np.searchsorted(bounds[1:], place, side="right").tolist())


def _running(prices: Prices, order: npt.NDArray[np.int64]) -> Array:
    """Returns what stages cost that begin with the line and end at each place, a row for each."""
    once, each = (
        np.concatenate([[0.0], np.cumsum(weights[order])]) for weights in (prices.once, prices.each)
    )
    found: Array = once + prices.times[:, None] * each
    return found


def _places_between(
    place: npt.NDArray[np.int64], groups: Iterable[Iterable[int]]
) -> npt.NDArray[np.int64]:
    """Returns the places inside a line that part no nodes that have to stay together."""
    inside = np.zeros(len(place) + 1, np.int64)
    for group in groups:
        places = place[list(group)]
        inside[places.min() + 1] += 1
        inside[places.max() + 1] -= 1
    return np.flatnonzero(np.cumsum(inside) == 0)[1:-1]


def _near(free: npt.NDArray[np.int64], bound: int) -> npt.NDArray[np.int64]:
    """Returns the places around a boundary."""
    at = int(np.searchsorted(free, bound))
    return free[max(0, at - PLACES) : at + PLACES]


def _score(
    running: Array, bounds: Sequence[npt.NDArray[np.int64]], ranks: Sequence[int], weight: float
) -> Array:
    """Returns the largest rank, and a little of the largest stage, for arrays of boundaries."""
    totals: list[Array] = [np.zeros(())] * (1 + max(ranks))
    largest: Array = np.zeros(())
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        value = running[stage, end] - running[stage, begin]
        totals[ranks[stage]] = totals[ranks[stage]] + value
        largest = np.maximum(largest, value)
    worst: Array = np.maximum.reduce(np.broadcast_arrays(*totals))
    return worst + max(weight, STAGE_WEIGHT) * largest
