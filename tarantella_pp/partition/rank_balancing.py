"""Stages that share a rank: boundaries are moved until the largest rank has little to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from tarantella_pp.partition.solvers.problem.digraph import adjacency, topological
from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    IntArray,
    Problem,
    weighted_counts,
)

MOST_POSITIONS = 300
"""Positions of a boundary that are tried at a time: those around it, and some of all others."""
MOST_CHOICES = 200_000
"""Sets of boundaries up to which all of them are tried."""
LEAST_BUBBLE_WEIGHT, LAST = 1e-2, 1e-4
"""How much the largest stage at least, and then what is cut, count besides the largest rank."""


def rank_totals(values: Sequence[float] | FloatArray, ranks: Sequence[int]) -> FloatArray:
    """Adds up the values of stages on each rank."""
    values = np.asarray(values, dtype=np.float64)
    return weighted_counts(np.asarray(ranks), values, 1 + max(ranks)) if ranks else values


def lower_bound(problem: Problem, ranks: Sequence[int]) -> float:
    """Returns what the largest rank of every assignment has at least: its share of everything."""
    once, each = _weights(problem)
    total = float(once.sum() + problem.flight.min() * each.sum())
    return total / (1 + max(ranks))


def balance_ranks(
    problem: Problem, assignment: Sequence[int], ranks: Sequence[int], bubble_weight: float = 0.0
) -> tuple[int, ...]:
    """Makes the largest rank small, beginning with stages of which the largest is small.

    A step takes as long as the largest rank needs for all its stages, whatever each of them has,
    and stages that are as equal as layers allow add up to unequal ranks. Besides, every stage but
    the last must have had a turn before all ranks work, which takes longer the larger they are. The
    nodes are laid out in a line that keeps the stages, and its best boundaries are found: among all
    of them, or where these are too many by moving two at a time until nothing gets better. What is
    cut decides between equals.
    """
    line = _Line(problem, assignment, ranks, max(bubble_weight, LEAST_BUBBLE_WEIGHT))
    score, bounds = line.score(line.bounds), line.bounds
    if line.choices <= MOST_CHOICES:
        return line.assignment(min((score, bounds), line.best_of_all())[1])
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, problem.num_stages), 2):
            best, better = line.best(bounds, i, j)
            if best < score * (1 - 1e-9):
                score, bounds, improved = best, better, True
    return line.assignment(bounds)


class _Line:
    """The nodes one behind the other, and what the stages between boundaries have."""

    def __init__(
        self,
        problem: Problem,
        assignment: Sequence[int],
        ranks: Sequence[int],
        bubble_weight: float,
    ) -> None:
        edges = [(int(before), int(after)) for before, after in problem.precedence]
        order = topological(*adjacency(problem.num_nodes, edges))
        place = np.empty(problem.num_nodes, np.int64)
        place[order] = np.arange(problem.num_nodes)
        stages = np.asarray(assignment)
        self._problem, self._ranks, self._bubble_weight = problem, list(ranks), bubble_weight
        self._order: IntArray = np.lexsort((place, stages))
        self._place = np.argsort(self._order)
        counts = np.bincount(stages, minlength=problem.num_stages)
        self.bounds: list[int] = [0, *np.cumsum(counts).tolist()]
        once, each = _weights(problem)
        self._once, self._each = self._running(once), self._running(each)
        self._static = self._running(problem.static_memory)
        self._kept = self._running(problem.activation_memory)
        self._allowed, self._cut = self._allowed_positions(), self._cut_bytes()
        self._total = float(self._once[-1] + problem.flight.max() * self._each[-1]) or 1.0

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
        return math.comb(len(self._allowed) - 2, self._problem.num_stages - 1)

    def best_of_all(self) -> tuple[float, list[int]]:
        """Finds the best boundaries; returns their score, too."""
        inner, end = self._allowed[1:-1], self.bounds[-1]
        chosen = itertools.combinations(inner.tolist(), self._problem.num_stages - 1)
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

    def _scores(self, bounds: Sequence[IntArray]) -> FloatArray:
        """Scores of boundaries, each of which may be an array that fits the others."""
        problem = self._problem
        totals: list[FloatArray] = [np.zeros(())] * (1 + max(self._ranks))
        largest: FloatArray = np.zeros(())
        too_much: FloatArray = np.zeros(())
        for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
            held = problem.flight[stage]
            value = self._once[high] - self._once[low] + held * (self._each[high] - self._each[low])
            totals[self._ranks[stage]] = totals[self._ranks[stage]] + value
            largest = np.maximum(largest, value)
            if problem.limits is not None:
                memory = self._static[high] - self._static[low]
                memory = memory + held * (self._kept[high] - self._kept[low])
                too_much = np.where(memory > problem.limits[stage], np.inf, too_much)
        worst = np.maximum.reduce(np.broadcast_arrays(*totals))
        cut = sum((self._cut[bound] for bound in bounds[1:-1]), np.zeros(()))
        scores: FloatArray = (
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

    def _running(self, weights: FloatArray) -> FloatArray:
        """Returns sums of weights up to each place of the line."""
        return np.concatenate([[0.0], np.cumsum(weights[self._order])])

    def _allowed_positions(self) -> IntArray:
        """Returns the places that part no nodes that have to stay together."""
        inside = np.zeros(len(self._order) + 1, np.int64)
        for group, apart in zip(self._problem.groups, self._problem.apart, strict=True):
            if not apart:
                places = self._place[list(group)]
                inside[places.min() + 1] += 1
                inside[places.max() + 1] -= 1
        return np.flatnonzero(np.cumsum(inside) == 0)

    def _cut_bytes(self) -> FloatArray:
        """Returns the share of all bytes that travel across each place."""
        across = np.zeros(len(self._order) + 1)
        for tensor in self._problem.tensors:
            places = self._place[list(tensor.nodes)]
            across[places.min() + 1] += tensor.bytes
            across[places.max() + 1] -= tensor.bytes
        everything = sum(tensor.bytes for tensor in self._problem.tensors) or 1.0
        shares: FloatArray = np.cumsum(across) / everything
        return shares


def _weights(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """What of the objective each node adds to its stage: once, and for each micro-batch held."""
    if problem.objective == "memory":
        return problem.static_memory, problem.activation_memory
    return problem.work, np.zeros(problem.num_nodes)
