"""The best cuts of one linear order, by dynamic programming over its prefixes."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    INPUT,
    Instance,
    Resource,
    Terms,
)
from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    IntArray,
    weighted_counts,
)

#: Cuts considered at a time; longer orders are thinned first and refined afterwards.
MAX_CUTS = 640
#: Cost of the dearest stage that is looked at, over what each has on average; by how much it grows
#: where no plan keeps within it.
FIRST_GUESS, NEXT_GUESS = 1.3, 2.0


class OrderDP:
    """Cuts linear orders of an instance into stages, each as well as the order allows."""

    def __init__(self, instance: Instance, max_cuts: int = MAX_CUTS) -> None:
        self._instance = instance
        self._max_cuts = max_cuts
        self._layouts = [_Layout(resource.terms) for resource in instance.resources]

    def solve(self, order: IntArray, capacity: float | None = None) -> tuple[float, IntArray]:
        """Cuts one order."""
        n = len(order)
        position = np.empty(n, np.int64)
        position[order] = np.arange(n)
        if n < self._max_cuts:
            return self._cut(order, position, np.arange(n + 1), capacity)
        cuts = self._thin(order, position)
        value, stages = self._cut(order, position, cuts, capacity)
        if np.isfinite(value):
            bounds = np.searchsorted(stages[order], np.arange(1, self._instance.num_stages))
            reach = self._max_cuts // (2 * self._instance.num_stages) + 1
            near = (bounds[:, None] + np.arange(-reach, reach + 1)[None, :]).ravel()
            cuts = np.unique(np.concatenate([[0, n], near[(near >= 0) & (near <= n)]]))
            finer = self._cut(order, position, cuts, capacity)
            value, stages = min((value, stages), finer, key=lambda pair: pair[0])
        return value, stages

    def _thin(self, order: IntArray, position: IntArray) -> IntArray:
        """Picks cuts evenly by work, in each slice the one that cuts least."""
        n, instance = len(order), self._instance
        resource = instance.objective
        layout = self._layouts[0]
        work = np.cumsum((resource.fixed + resource.factor.mean() * resource.held)[order])
        weight = work / max(work[-1], 1e-300) + np.arange(1, n + 1) / n
        slices = np.minimum((weight / 2 * (self._max_cuts - 2)).astype(np.int64), self._max_cuts)
        crossing = layout.crossing(position, n)[1:]
        best = np.lexsort((crossing, slices))
        first = best[np.flatnonzero(np.diff(slices[best], prepend=-1))]
        return np.unique(np.concatenate([[0], first + 1, [n]]))

    def _cut(
        self, order: IntArray, position: IntArray, cuts: IntArray, capacity: float | None
    ) -> tuple[float, IntArray]:
        prices = self._prices(order, position, cuts, capacity)
        # Dearer stages than the best plan's need not be looked at: what that is has to be guessed.
        most = prices.share * FIRST_GUESS if capacity is None else capacity
        while True:
            width = prices.width(most)
            value, bounds = self._cheapest(prices, width, len(cuts), additive=capacity is not None)
            if value <= most or width == len(cuts) or capacity is not None:
                break
            most *= NEXT_GUESS
        stages = np.zeros(len(order), np.int64)
        for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
            stages[order[cuts[begin] : cuts[end]]] = stage
        return value, stages

    def _cheapest(
        self, prices: StagePrices, width: int, count: int, *, additive: bool
    ) -> tuple[float, list[int]]:
        """Finds the best bounds of stages that are no wider; returns their value, too."""
        # best[i] of the cuts before the first one, and of all others
        best = np.full(width - 1 + count, np.inf)
        best[width - 1] = 0.0
        before, ends = sliding_window_view(best, width), np.arange(count)
        reached = np.empty((count, width))
        parents = []
        for stage in range(self._instance.num_stages):
            (np.add if additive else np.maximum)(before, prices.table(stage, width), out=reached)
            nearest = reached.argmin(axis=1)
            best[width - 1 :] = reached[ends, nearest]
            parents.append(np.maximum(ends - (width - 1) + nearest, 0))
        bounds = [count - 1]
        for parent in reversed(parents):
            bounds.append(int(parent[bounds[-1]]))
        return float(best[-1]), bounds[::-1]

    def _prices(
        self, order: IntArray, position: IntArray, cuts: IntArray, capacity: float | None
    ) -> StagePrices:
        tables, index = [], np.arange(len(cuts))
        backward = index[:, None] < index[None, :] + self._instance.strict
        for resource, layout in zip(self._instance.resources, self._layouts, strict=True):
            fixed = _differences(resource.fixed, order, cuts)
            held = _differences(resource.held, order, cuts) if resource.held.any() else None
            fixed, held = layout.add(fixed, held, position, cuts)
            behind = _by_end(held, 0.0) if held is not None else None
            fixed = _by_end(fixed, np.inf)
            np.copyto(fixed[1:], np.inf, where=backward)
            tables.append((resource, fixed, behind))
        return StagePrices(tables, capacity)


class StagePrices:
    """Costs of all stages between two cuts, by the cut that ends them; infinite where not allowed.

    Stages that go back over few cuts lie along the diagonal; of a table of these the columns are
    the cuts from farthest to nearest::

        end 0   [ . ]                     . . 0       a stage that ends at cut 3 and
        end 1   [ a . ]                   . a .       begins at cut 1 is c
        end 2   [   b . ]        ->       . b .
        end 3   [   c d . ]               c d .
    """

    def __init__(
        self,
        tables: list[tuple[Resource, FloatArray, FloatArray | None]],
        capacity: float | None = None,
    ) -> None:
        self._tables = tables
        self._capacity = capacity
        self._same = all(resource.uniform for resource, _, _ in tables)
        self._known: dict[int, FloatArray] = {}

    @property
    def share(self) -> float:
        """What each stage would cost if all were equal and nothing were cut."""
        resource, fixed, held = self._tables[0]
        whole = fixed[-1, 0] + (0.0 if held is None else resource.factor.mean() * held[-1, 0])
        return float(resource.scale.mean() * whole / len(resource.scale))

    def width(self, most: float) -> int:
        """Returns how many cuts stages go back at most that cost no more than so much."""
        resource, fixed, held = self._tables[0]
        least = fixed[1:] if held is None else fixed[1:] + resource.factor.min() * held[1:]
        within = least <= most / resource.scale.min() * (1 + 1e-9)
        farthest = np.where(within.any(axis=1), within.argmax(axis=1), len(within))
        return max(1, int((np.arange(len(within)) - farthest).max()) + 1)

    def table(self, stage: int, width: int) -> FloatArray:
        """Returns the costs of one stage that goes back so many cuts, `(cuts, width)`."""
        if width in self._known:
            return self._known[width]
        costs, allowed = [], None
        for index, (resource, by_end, held_by_end) in enumerate(self._tables):
            cost = _diagonal(by_end, width)
            if held_by_end is not None:
                cost = cost + resource.factor[stage] * _diagonal(held_by_end, width)
            if resource.scale[stage] != 1.0:
                cost = resource.scale[stage] * cost
            cap = resource.cap[stage]
            if index == 0 and self._capacity is not None:
                cap = min(cap, self._capacity)
            if np.isfinite(cap):
                within = cost <= cap
                allowed = within if allowed is None else allowed & within
            costs.append(cost)
        wanted = costs[0] if self._capacity is None else costs[-1]
        table = wanted if allowed is None else np.where(allowed, wanted, np.inf)
        if self._same:
            self._known[width] = table
        return table


def _by_end(table: FloatArray, before: float) -> FloatArray:
    """Turns a table by begin and end round, behind a row of what is before it."""
    turned = np.empty((len(table) + 1, len(table)))
    turned[0], turned[1:] = before, table.T
    return turned


def _diagonal(by_end: FloatArray, width: int) -> FloatArray:
    """Returns the entries left of the diagonal; before the first column are those above it."""
    count = by_end.shape[1]
    step = by_end.itemsize
    return as_strided(
        by_end.ravel()[count - width + 1 :], (count, width), ((count + 1) * step, step)
    )


def _differences(weights: FloatArray, order: IntArray, cuts: IntArray) -> FloatArray:
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])[cuts]
    table: FloatArray = sums[None, :] - sums[:, None]
    return table


class _Layout:
    """The tensors of a resource as flat arrays, to be priced on any order.

    A stage from cut i to cut j pays for the tensors cut at i and at j, less a correction for
    those cut at both. Each correction holds for all i >= a and j <= b, with (a, b) given by two
    pins next to each other along the order: points in a table, summed up from its corner.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._tensor = np.repeat(np.arange(len(terms)), [len(pins) for pins in terms.pins])
        self._flat, _ = terms.flat()

    def crossing(self, position: IntArray, n: int) -> FloatArray:
        """Returns the touch and receive cost of the tensors across each cut, `(n + 1,)`."""
        total = np.zeros(n + 2)
        if len(self._terms):
            first, last, _, _, _ = self._sorted(position)
            weight = self._terms.touch + self._terms.receive + self._terms.receive_held
            total += weighted_counts(first + 1, weight, n + 2) - weighted_counts(
                last + 1, weight, n + 2
            )
        crossing: FloatArray = np.cumsum(total)[: n + 1]
        return crossing

    def _sorted(
        self, position: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Returns first and last position by tensor; left, right, tensor of each gap."""
        pins = position[self._flat]
        by_tensor = np.lexsort((pins, self._tensor))
        pins = pins[by_tensor]
        starts = np.searchsorted(self._tensor, np.arange(len(self._terms)))
        ends = np.searchsorted(self._tensor, np.arange(len(self._terms)), "right") - 1
        left = np.flatnonzero(self._tensor[:-1] == self._tensor[1:])
        return pins[starts], pins[ends], pins[left], pins[left + 1], self._tensor[left]

    def add(
        self,
        fixed: FloatArray,
        held: FloatArray | None,
        position: IntArray,
        cuts: NDArray[np.int64],
    ) -> tuple[FloatArray, FloatArray | None]:
        """Adds what the tensors cost to the tables of the nodes' costs, `(cuts, cuts)`."""
        terms = self._terms
        if not len(terms):
            return fixed, held
        first, last, left, right, tensor = self._sorted(position)
        after = np.searchsorted(cuts, left, "right")
        until = np.searchsorted(cuts, right, "right") - 1
        opens = np.searchsorted(cuts, first, "right")
        closes = np.searchsorted(cuts, last, "right") - 1
        size = len(cuts)
        if terms.has_touch:
            across = _spans(opens, closes, terms.touch, size)
            points = _points(opens, closes, terms.touch, size)
            points += _points(after, until, terms.touch[tensor], size)
            fixed += across[:, None] + across[None, :] - _corner_sums(points)
        if terms.has_receive:
            maker = np.where(terms.producer >= 0, position[terms.producer], first)
            live = np.searchsorted(cuts, maker, "right")
            paid = terms.producer != INPUT
            kept = paid[tensor] & ((terms.producer[tensor] == ANY) | (left >= maker[tensor]))
            for weight, table in ((terms.receive, fixed), (terms.receive_held, held)):
                if not weight.any():
                    continue
                if table is None:
                    table = held = np.zeros((size, size))
                cost = np.where(paid, weight, 0.0)
                points = _points(after[kept], until[kept], cost[tensor[kept]], size)
                table += _spans(live, closes, cost, size)[:, None] - _corner_sums(points)
        return fixed, held


def _spans(begin: IntArray, end: IntArray, weight: FloatArray, size: int) -> FloatArray:
    """Sums weights over the inclusive ranges that hold each index."""
    some = begin <= end
    delta = weighted_counts(begin[some], weight[some], size + 1)
    delta = delta - weighted_counts(end[some] + 1, weight[some], size + 1)
    sums: FloatArray = np.cumsum(delta)[:size]
    return sums


def _points(row: IntArray, column: IntArray, weight: FloatArray, size: int) -> FloatArray:
    some = (row < size) & (column >= 0) & (row <= column)
    flat = weighted_counts(row[some] * size + column[some], weight[some], size * size)
    return flat.reshape(size, size)


def _corner_sums(points: FloatArray) -> FloatArray:
    """Sums at (i, j) all points (a, b) with a <= i and b >= j."""
    sums: FloatArray = np.cumsum(np.cumsum(points, axis=0)[:, ::-1], axis=1)[:, ::-1]
    return sums
