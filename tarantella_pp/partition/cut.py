"""The one solver: a shortest path over down-sets, each step priced as a whole stage.

    operations before a cut     {}      {a}     {a b}   {a b c}  {a b c d}
    stage 0                     |--------------->|
    stage 1                                      |------->|
    stage 2                                               |-------->|

A plan is a path; its value is the price of its dearest stage. What adds up over operations, which
is quick, and what is known of their parts tell of most stages that they are too dear: these are
never priced. Of paths of equal value the one that cuts the fewest bytes is taken.

Where the down-sets are too many to be listed, those along some topological orders are taken, then
those around the best plan, until that does not get better. There lines through the prices of some
stages stand for what all of them cost at the least: sums alone would leave too many to be priced.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.graph.ideals import Array, Blocks, Ideals, summed
from tarantella_pp.partition.plan.plan_parts import TOLERANCE

# How far above what it is at the least the dearest stage is looked for, one after the other.
SLACKS = (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.22, 0.3, 0.4, 0.5, 0.7, 1.0, math.inf)
# Relative distance from the most that can be said of a bound at which that is good enough.
CLOSE = 1e-3
# How often plans around the best are looked for without finding a better one, by sums and by
# prices, and the orders that are drawn for each time.
ROUNDS, PRICED_ROUNDS, DRAWS = 12, 3, 3
# How often lines are laid through prices, through how many more of each stage, and how far above
# the best by the lines before these may be.
FITS, SAMPLES, NEAR = 3, 60, 1.1
# Prices a stage between two down-sets, whose operations are bits, again and again. The second
# number is what it costs at the least whatever the others are, the third what it and all stages
# around it cost at the least besides `once`.
Price = Callable[[int, int, int], tuple[float, float, float]]
Indices = npt.NDArray[np.intp]

# Of the two prices of a stage, which counts.
USUAL, LEAST = 0, 1
# Sums that are no more than the memory of stages, and the bytes that each stage may have.
Limits = tuple["Prices", Sequence[float]]
# Bytes by which rounding may put a sum above what a stage has.
ROUNDING = 100


@dataclass(frozen=True, eq=False)
class Prices:
    """What stages cost.

    A stage costs `once + times[stage] * each` at the least, summed over its operations.
    """

    once: Array  # part of each operation's cost that is the same on all stages
    each: Array  # part that counts a number of times
    times: Array  # how many times on each stage
    made: Array  # what each operation makes, kept or not, by which prices of memory may go
    # Prices the memory of a stage, which has its sum if that is more; `None` where it always does
    price: Price | None = None
    weighs: bool = False  # whether the largest memory is what plans are compared by
    # Operations, the first makes a tensor and others read it, and bytes cut if they part
    wires: Sequence[tuple[tuple[int, ...], float]] = ()
    alike: float = TOLERANCE / 4  # relative distance of values that count as equal
    # What stages have of memory at the least, and what each may have; `None` for any
    limits: Limits | None = None
    # What stages are taken to cost besides their sums, each: a number, and what a byte is worth
    # that is cut before it, behind it and made by it
    more: Array | None = None

    @property
    def memory(self) -> Prices:
        """What stages have of memory, which `price` says more of."""
        return self if self.weighs or self.limits is None else self.limits[0]

    def guessing(self, more: Array) -> Prices:
        """The same with more of memory than its sums."""
        limits = self.limits and (replace(self.limits[0], more=more), self.limits[1])
        return replace(self, more=more if self.weighs else None, limits=limits)

    def running(self, ideals: Ideals) -> tuple[Array, Array]:
        """Returns sums up to where each stage begins and ends; what lies between is its cost."""
        begins = ends = ideals.sums(self.once) + self.times[:, None] * ideals.sums(self.each)
        if self.more is None:
            return begins, ends
        cut, made = open_bytes(ideals, self.wires), ideals.sums(self.made)
        fixed, before, behind, own = self.more.T[..., None]
        return begins - fixed - before * cut + own * made, ends + behind * cut + own * made

    def bound(self, blocks: Blocks) -> float:
        """Returns what the dearest stage costs at the least: its share, or the heaviest block."""
        heaviest = summed(blocks.owner, self.once + self.times.min() * self.each).max()
        shares = self._shares(self.times, self.once.sum(), self.each.sum())
        low = float(max(heaviest, *shares))
        if self.times.min() == self.times.max():
            return low
        parts = [summed(blocks.segments, part).tolist() for part in (self.once, self.each)]
        segments = list(zip(*parts, strict=True))
        high = low + float((self.once + self.times.max() * self.each).sum())
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._holds(middle, segments) else (middle, high)
        return low

    def _holds(self, cap: float, segments: list[tuple[float, float]]) -> bool:
        """Whether stages of a cap hold segments one behind the other, were each a liquid.

        What counts once comes first: later stages count all else less often, or as if they did.
        """
        stages = iter(np.minimum.accumulate(self.times).tolist())
        room, times = cap, next(stages)
        for once, each in segments:
            while once + times * each > room:
                taken = min(once, room)
                once -= taken
                each -= (room - taken) / times if times else 0.0
                following = next(stages, None)
                if following is None:
                    return False
                room, times = cap, following
            room -= once + times * each
        return True

    def fits(self, stages: slice, cap: float, once: Array, each: Array) -> npt.NDArray[np.bool_]:
        """Whether sums of both parts may fit on some stages that cost a cap each, at most."""
        times = self.times[stages]
        fits: npt.NDArray[np.bool_] = np.ones(len(once), bool)
        for share in self._shares(times, once, each) if len(times) else ():
            fits &= share <= cap
        return fits

    @staticmethod
    def _shares(times: Array, once: Array, each: Array) -> list[Array]:
        """Returns what the dearest of some stages costs at the least, that have such sums.

        Added up, stages that have a_s and b_s of them cost at least `a + times_min b`; weighted by
        1 / times_s, so that b counts in full, at least `a / times_max + b`.
        """
        shares = [(once + times.min() * each) / len(times)]
        if times.min() > 0:
            shares.append((once / times.max() + each) / (1 / times).sum())
        return shares


@dataclass(frozen=True, slots=True)
class Cut:
    """What was found."""

    # Stage of each operation; the best first, then one that may be as good
    assignments: tuple[tuple[int, ...], ...]
    bound: float  # what the dearest stage costs at the least in all plans
    method: str  # how it was found, in words


def best_cut(blocks: Blocks, prices: Prices) -> Cut | None:
    """Finds the path whose dearest stage is the cheapest, `None` where no path can be."""
    if blocks.ideals is None:
        return _around(blocks, prices)
    found = cheapest(blocks.ideals, prices)
    if found is None:
        return None
    bound, path = found
    paths = [path]
    if prices.price is not None:
        lower = _Paths(blocks.ideals, prices, LEAST).shortest(bound)
        if lower is not None:
            bound, path = lower
            paths.append(path)
    method = f"shortest path over {len(blocks.ideals)} down-sets"
    return Cut(tuple(map(blocks.ideals.assignment, paths)), bound, method)


def cheapest(
    ideals: Ideals, prices: Prices, below: float = math.inf
) -> tuple[float, list[int]] | None:
    """Finds the best path over a family of down-sets, if that is not above a value."""
    paths = _Paths(ideals, prices, None)
    found = paths.growing(prices.bound(ideals.blocks), below)
    if found is not None and prices.price is not None:
        least, path = found
        paths = _Paths(ideals, prices, USUAL)
        # Prices take long: only stages that are no dearer than they must be are priced.
        found = paths.growing(least, min(max(paths.value(path), least), below))
    return None if found is None else (found[0], paths.fewest_cut(*found))


def _around(blocks: Blocks, prices: Prices) -> Cut | None:
    """Finds a good path where down-sets are too many: by sums along some orders, then by prices."""
    best = _improved(blocks, replace(prices, price=None), _orders(blocks), ROUNDS)
    if best is not None and prices.price is not None:
        lines = [_line(blocks, best, order) for order in _orders(blocks)[:DRAWS]]
        guess = _fitted(blocks.along(lines), prices, prices.price)
        best = _improved(blocks, guess, lines, PRICED_ROUNDS)
    if best is None:
        return None
    return Cut((best,), prices.bound(blocks), "best path along some orders")


def _improved(
    blocks: Blocks, prices: Prices, orders: list[list[int]], rounds: int
) -> tuple[int, ...] | None:
    """Finds the best path along some orders, then along drawn ones in line with it."""
    draw, best, value, since = random.Random(0), None, math.inf, 0
    while since < rounds and value > 0:
        family = blocks.along(orders)
        found, since = cheapest(family, prices, value * (1 - CLOSE)), since + 1
        if found is not None:
            value, best, since = found[0], family.assignment(found[1]), 0
        if best is None:
            return None
        drawn = [draw.sample(range(len(blocks)), len(blocks)) for _ in range(DRAWS)]
        orders = [_line(blocks, best, order) for order in drawn]
    return best


def _fitted(ideals: Ideals, prices: Prices, price_of: Price) -> Prices:
    """Lays lines through prices of stages that may be good ones, below most of them."""
    draw, memory = random.Random(0), prices.memory
    sums, made = memory.running(ideals)[0], ideals.sums(memory.made)
    cut = open_bytes(ideals, memory.wires)
    known: list[list[tuple[float, ...]]] = [[] for _ in memory.times]
    for _ in range(FITS):
        paths = _Paths(ideals, prices, None)
        found = paths.growing(prices.bound(ideals.blocks), math.inf)
        if found is None or found[0] <= 0:
            break
        lines = []
        for stage, near in enumerate(paths.near(found[0] * NEAR)):
            for begin, end in draw.sample(near, min(SAMPLES, len(near))):
                price = price_of(ideals.sets[begin], ideals.sets[end], stage)[USUAL]
                more = price - (sums[stage, end] - sums[stage, begin])
                known[stage].append((1.0, cut[begin], cut[end], made[end] - made[begin], more))
            *parts, rest = np.array(known[stage]).T
            lines.append(line := np.linalg.lstsq(np.transpose(parts), rest)[0])
            # What only keeps limits is any stage that may do so, and not the best of them.
            line[0] -= (1 if prices.weighs else 3) * np.std(rest - line @ parts)
        prices = prices.guessing(np.array(lines))
    return prices


def _orders(blocks: Blocks) -> list[list[int]]:
    """Returns topological orders: as given, in depth and in breadth, from either end."""
    import networkx as nx

    graph, back = blocks.graph, blocks.graph.reverse()
    return [
        [*range(len(blocks))],
        [*nx.dfs_postorder_nodes(back)],
        [*nx.dfs_postorder_nodes(graph)][::-1],
        [*nx.topological_sort(graph)],
        [*nx.topological_sort(back)][::-1],
    ]


def _line(blocks: Blocks, assignment: Sequence[int], order: Sequence[int]) -> list[int]:
    """Returns a topological order that keeps stages whole, and is close to another order."""
    import networkx as nx

    rank = np.empty(len(blocks))
    rank[list(order)] = np.arange(len(blocks)) / len(blocks)
    stages = np.empty(len(blocks))
    stages[blocks.owner] = assignment
    ranks = (stages + rank).tolist()
    return [*nx.lexicographical_topological_sort(blocks.graph, key=ranks.__getitem__)]


class _Paths:
    """Paths over a family of down-sets; stages cost their sums where they have no price."""

    def __init__(self, ideals: Ideals, prices: Prices, which: int | None) -> None:
        self._ideals, self._prices, self._which = ideals, prices, which
        self._once, self._each = ideals.sums(prices.once), ideals.sums(prices.each)
        self._state = ideals.sums(prices.memory.once)
        self._running = prices.running(ideals)
        self._memory = None if prices.limits is None else prices.limits[0].running(ideals)

    def growing(self, least: float, below: float) -> tuple[float, list[int]] | None:
        """Looks for the best path near what it costs at the least, then further away."""
        for slack in SLACKS:
            # An infinite slack of nothing is none.
            cap = min(below, math.inf if slack == math.inf else least * (1 + slack))
            found = self.shortest(cap)
            if found is not None or cap == below:
                break
        return found

    def value(self, path: Sequence[int]) -> float:
        """Returns the price of the dearest stage of a path."""
        steps = enumerate(itertools.pairwise(path))
        return max(self.price(begin, end, stage)[0] for stage, (begin, end) in steps)

    def price(self, begin: int, end: int, stage: int) -> tuple[float, float]:
        """Prices a stage, and says what all around it cost, too; see `Price`."""
        price, shared = self._once[end] - self._once[begin], 0.0
        price += self._prices.times[stage] * (self._each[end] - self._each[begin])
        price_of, limits = self._prices.price, self._prices.limits
        if self._which is not None and price_of is not None:
            *both, shared = price_of(self._ideals.sets[begin], self._ideals.sets[end], stage)
            memory = both[self._which]
            if limits is not None and memory > limits[1][stage]:
                return math.inf, shared
            price = max(price, memory) if self._prices.weighs else price
        return float(price), shared

    def near(self, cap: float) -> list[list[tuple[int, int]]]:
        """Returns stages, by the sets between which they lie, of paths that are not above a cap."""
        windows, _ = self._windows(cap)
        found = []
        for stage, (begins, ends) in enumerate(itertools.pairwise(windows)):
            rows, columns = np.nonzero(self._sums(stage, begins, ends) <= cap)
            found.append([*zip(begins[rows].tolist(), ends[columns].tolist(), strict=True)])
        return found

    def _sums(self, stage: int, begins: Indices, ends: Indices) -> Array:
        """Returns what stages cost at the least, infinite where they cannot be."""
        before, behind = self._running
        sums: Array = behind[stage, ends] - before[stage, begins][:, None]
        sums[~self._ideals.inside[np.ix_(begins, ends)]] = np.inf
        if self._prices.limits is not None and self._memory is not None:
            before, behind = self._memory
            most = self._prices.limits[1][stage] + ROUNDING
            sums[behind[stage, ends] - before[stage, begins][:, None] > most] = np.inf
        return sums

    def _windows(self, cap: float) -> tuple[list[Indices], list[Array]]:
        """Returns the sets that may come before each stage, and the end, if none is above a cap.

        Each comes with the least that follows behind it.
        """
        prices, most = self._prices, cap * (1 + TOLERANCE)
        left = self._once[-1] - self._once, self._each[-1] - self._each
        windows, ahead = [np.zeros(1, np.intp)], [np.zeros(1)]
        for stage in range(1, len(prices.times)):
            fits = prices.fits(slice(stage), most, self._once, self._each)
            fits &= prices.fits(slice(stage, None), most, *left)
            windows.append(np.flatnonzero(fits))
        windows.append(np.array([len(self._ideals) - 1]))
        for stage in range(len(prices.times) - 1, -1, -1):
            sums = self._sums(stage, windows[stage], windows[stage + 1])
            least = np.maximum(sums, ahead[0], out=sums).min(axis=1, initial=np.inf)
            keep = (least <= cap) & np.isfinite(least)
            windows[stage] = windows[stage][keep]
            ahead.insert(0, least[keep])
        return windows, ahead

    def shortest(self, cap: float) -> tuple[float, list[int]] | None:
        """Finds the path whose dearest stage is the cheapest, if that is not above a cap."""
        cap = math.inf if cap == math.inf else cap * (1 + TOLERANCE / 8)
        windows, ahead = self._windows(cap)
        reached, origins = np.zeros(1), []
        for stage in range(len(self._prices.times)):
            begins, ends = windows[stage : stage + 2]
            if not len(begins) or not len(ends):
                return None
            least = np.maximum(reached[:, None], self._sums(stage, begins, ends))
            if self._which is None:
                origin = least.argmin(axis=0)
                behind = least[origin, np.arange(len(ends))]
            else:
                behind, origin = self._priced(stage, windows, least, reached, ahead[stage + 1], cap)
            arrived = (behind <= cap) & np.isfinite(behind)
            windows[stage + 1], ahead[stage + 1] = ends[arrived], ahead[stage + 1][arrived]
            reached = behind[arrived]
            origins.append(origin[arrived])
        return (float(reached[0]), _path(windows, origins)) if len(reached) else None

    def _priced(
        self,
        stage: int,
        windows: Sequence[Indices],
        least: Array,
        reached: Array,
        ahead: Array,
        cap: float,
    ) -> tuple[Array, Indices]:
        """Returns what the dearest stage costs up to each end of a stage, and where it begins."""
        begins, ends = windows[stage : stage + 2]
        behind, origin = np.full(len(ends), np.inf), np.zeros(len(ends), np.intp)
        limits, inside, state = self._prices.limits, self._ideals.inside, self._state
        most = math.inf if limits is None else limits[1][stage] + ROUNDING
        # What is known of stages from each beginning, by those priced up to the last end.
        known, last = np.zeros(len(begins)), 0
        for column in np.flatnonzero(least.min(axis=0) <= cap).tolist():
            end, comes = int(ends[column]), ahead[column]
            known, last = known * inside[last, end], end
            rows = np.flatnonzero(least[:, column] <= cap)
            rows = rows[np.argsort(least[rows, column], kind="stable")]
            # A path is as dear as what still has to come, however cheap it was.
            lows = np.maximum(least[rows, column], comes)
            best = min(cap, math.nextafter(math.inf, 0)), len(rows)
            while True:
                memory = state[end] - state[begins[rows]] + known[rows]
                lows[memory > most] = np.inf
                lows = np.maximum(lows, memory * self._prices.weighs)
                place = int(lows.argmin())
                if (lows[place], place) >= best:
                    break
                row, lows[place] = int(rows[place]), np.inf
                price, shared = self.price(int(begins[row]), end, stage)
                price = max(reached[row], price)
                if (max(price, comes), place) < best:
                    best = max(price, comes), place
                    behind[column], origin[column] = price, row
                around = inside[begins, begins[row]] | (begins == begins[row])
                np.maximum(known, shared, out=known, where=around)
        return behind, origin

    def fewest_cut(self, value: float, path: list[int]) -> list[int]:
        """Finds a path that is as good and cuts the fewest bytes."""
        cap = value * (1 + self._prices.alike)
        cuts = open_bytes(self._ideals, self._prices.wires)
        windows, _ = self._windows(cap)
        total, origins = np.zeros(1), []
        for stage, (begins, ends) in enumerate(itertools.pairwise(windows)):
            costs = np.where(self._sums(stage, begins, ends) <= cap, total[:, None], np.inf)
            if not costs.size:
                return path
            origin = costs.argmin(axis=0)
            total = costs[origin, np.arange(len(ends))] + cuts[ends]
            origins.append(origin)
        found = _path(windows, origins)
        fewer = total[0] < np.inf and cuts[found].sum() < cuts[path].sum() * (1 - TOLERANCE)
        return found if fewer and self.value(found) <= cap else path


def _path(windows: Sequence[Indices], origins: Sequence[Indices]) -> list[int]:
    """Follows a path back from its end."""
    place, path = 0, [int(windows[-1][0])]
    for window, origin in zip(reversed(windows[:-1]), reversed(origins), strict=True):
        place = int(origin[place])
        path.append(int(window[place]))
    return path[::-1]


def open_bytes(ideals: Ideals, wires: Sequence[tuple[tuple[int, ...], float]]) -> Array:
    """Returns the bytes that are cut behind each down-set."""
    before, weights = ideals.before, np.zeros(ideals.before.shape[1])
    total = np.zeros(len(ideals))
    for (maker, *users), size in wires:
        weights[maker] += size
        if len(users) == 1:
            weights[users[0]] -= size
        else:
            total -= size * before[:, users].all(axis=1)
    return total + ideals.sums(weights)
