"""The ideals between two others, listed node by node; those alike in all that follows are one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.ideals import Words, pack
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.bounds import unit_of

_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False, slots=True)
class IdealRange:
    """Which ideals to list.

    Attributes:
        inside: Nodes that all of them hold, itself an ideal; shape `(nodes,)`.
        free: Nodes that they may hold, in topological order; all others they do not.
        low: Least work of an ideal less what it cuts, in the units of the sweep.
        high: Most work of an ideal and of what it cuts.
    """

    inside: NDArray[np.bool_]
    free: IntArray
    low: float
    high: float


@dataclass(frozen=True, eq=False, slots=True)
class Swept:
    """Ideals of a span, of each kind one.

    Attributes:
        span: The span.
        words: Bit sets of the free nodes that each ideal holds, shape `(words, ideals)`.
        work: Work of each ideal, shape `(ideals,)`.
        cut: What each ideal cuts, shape `(ideals,)`.
    """

    span: IdealRange
    words: Words
    work: FloatArray
    cut: FloatArray

    def __len__(self) -> int:
        """Returns the number of ideals."""
        return len(self.work)

    def members(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Returns the membership of some of the ideals, shape `(nodes, rows)`."""
        words = self.words[:, rows]
        member = np.repeat(self.span.inside[:, None], len(rows), axis=1)
        for place, node in enumerate(self.span.free.tolist()):
            member[node] = (words[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
        return member

    def take(self, rows: NDArray[np.intp]) -> Words:
        """Returns some of the ideals as bit sets of all nodes."""
        return pack(self.members(rows))


class IdealSweep:
    """Lists the ideals of spans.

    Node by node, each partial ideal goes on without the node and, where its predecessors are in,
    with it. Two of the same work that agree on every node which a later one reads have the same
    future: the one that cuts less is kept. In networks of repeated blocks with few different
    costs, that leaves thousands where there are 10^8 (the nodes that later ones read are a cut of
    the graph, of the kind that frontier-based search counts over; Sekine, Imai and Tani 1995).

    Attributes:
        unit: The unit of work; small where the costs have none of their own.
        work: Work of each node.
        error: Units by which the work of an ideal may be off.
    """

    def __init__(
        self, instance: Instance, costs: FloatArray, touch: FloatArray | None = None
    ) -> None:
        unit = unit_of(costs)
        self.unit = unit or float(costs.sum()) * 2.0**-45 or 1.0
        self.work: FloatArray = np.rint(costs / self.unit)
        self.error = 0.0 if unit else float(len(costs))
        self._instance = instance
        self._touch = None if touch is None else touch / self.unit

    def run(
        self,
        span: IdealRange,
        deadline: float,
        *,
        limit: int,
        random: np.random.Generator | None = None,
        alike: bool = False,
    ) -> Swept | None:
        """Lists the ideals of a span."""
        steps = _Steps(self._instance, span, self._touch)
        free = steps.free
        first, left = float(self.work[span.inside].sum()), float(self.work[span.free].sum())
        some = first + steps.cut <= span.high and first + left - steps.cut >= span.low
        words: Words = np.zeros((free.width, int(some)), np.uint64)
        work, cut = np.full(int(some), first), np.full(int(some), steps.cut)
        for place, node in enumerate(span.free.tolist()):
            if time.thread_time() > deadline:
                return None
            weight = float(self.work[node])
            left -= weight
            with_it, without = steps.costs(place, words)
            gone, more = cut + without, cut + with_it
            stays = (work + left >= span.low + gone) & (work + gone <= span.high)
            fits = (work + weight + more <= span.high) & (work + weight + left >= span.low + more)
            old, new = np.flatnonzero(stays), np.flatnonzero(fits & holds(words, free.preds[place]))
            grown = words[:, new]
            grown[place >> 6] |= np.uint64(1 << (place & 63))
            words = np.concatenate([words[:, old], grown], axis=1)
            cut = np.concatenate([gone[old], more[new]])
            work = np.concatenate([work[old], work[new] + weight])
            if alike:
                kept = np.arange(len(work))
            else:
                kept = distinct(words & free.frontier(place)[:, None], work, cut, random)
            if len(kept) > limit:
                if random is None:
                    return None
                kept = kept[np.lexsort((random.random(len(kept)), cut[kept]))[:limit]]
            words, work, cut = words[:, kept], work[kept], cut[kept]
        return Swept(span, words, work, cut)


def distinct(
    future: Words,
    work: FloatArray | IntArray,
    cost: FloatArray,
    random: np.random.Generator | None = None,
) -> NDArray[np.intp]:
    """Picks one row of each future and work, the one that costs least."""
    key = work.view(np.uint64) * np.uint64(_ODD)
    for word in future:
        key = (key ^ (key >> np.uint64(29)) ^ word) * np.uint64(_ODD)
    # Rows of equal key that differ are told apart below: at worst, some stay double.
    order = np.arange(len(key)) if random is None else random.permutation(len(key))
    keys = (cost[order], key[order]) if cost.any() else (key[order],)
    order = order[np.lexsort(keys)]
    same = (work[order[1:]] == work[order[:-1]]) & (
        future[:, order[1:]] == future[:, order[:-1]]
    ).all(axis=0)
    return order[np.concatenate([[True], ~same])] if len(order) else order


class FreeNodes:
    """Nodes that are chosen one after the other, or not, with bit sets of them.

    Attributes:
        place: Place of each node of the instance among these; -1 where it is none of them.
        preds: Those that come right before each, as bit sets.
        width: Words of a bit set.
    """

    def __init__(self, instance: Instance, nodes: IntArray) -> None:
        self.place = np.full(instance.num_nodes, -1, np.int64)
        self.place[nodes] = np.arange(len(nodes))
        self.width = max(1, (len(nodes) + 63) // 64)
        self._last = np.full(len(nodes), -1)
        self.preds = [self.mask(instance.preds[node]) for node in nodes.tolist()]
        for place, node in enumerate(nodes.tolist()):
            self.read(instance.preds[node], place)

    def mask(self, nodes: Sequence[int]) -> Words:
        """Returns the bit set of those nodes that are free."""
        mask = [0] * self.width
        for node in nodes:
            place = int(self.place[node])
            if place >= 0:
                mask[place >> 6] |= 1 << (place & 63)
        return np.array(mask, dtype=np.uint64)

    def read(self, nodes: Sequence[int], place: int) -> None:
        """Notes that the choice at a place depends on those of some nodes."""
        for node in nodes:
            own = self.place[node]
            if own >= 0:
                self._last[own] = max(self._last[own], place)

    def frontier(self, place: int) -> Words:
        """Returns the nodes up to this one that a later one reads."""
        bits = np.zeros(64 * self.width, np.uint8)
        bits[: place + 1] = self._last[: place + 1] > place
        return np.packbits(bits, bitorder="little").view(np.uint64)


class _Steps:
    """What a step needs to know of earlier choices.

    `cut` is what the tensors cost that are cut in any case.
    """

    def __init__(self, instance: Instance, span: IdealRange, touch: FloatArray | None) -> None:
        self.free = FreeNodes(instance, span.free)
        self._tensors: dict[int, list[tuple[float, Words, bool, bool]]] = {}
        self.cut = 0.0
        if touch is not None:
            self._add_tensors(instance, span, touch)

    def _add_tensors(self, instance: Instance, span: IdealRange, touch: FloatArray) -> None:
        free = self.free
        for pins, cost in zip(instance.objective.terms.pins, touch.tolist(), strict=True):
            places = sorted(int(free.place[pin]) for pin in pins)
            known_in = any(span.inside[pin] for pin in pins)
            known_out = any(free.place[pin] < 0 and not span.inside[pin] for pin in pins)
            inner = [place for place in places if place >= 0]
            if known_in and known_out:
                self.cut += cost
            if not inner or not cost or (known_in and known_out):
                continue
            nodes = span.free[inner].tolist()
            for index, place in enumerate(inner):
                if index or known_in or known_out:
                    entry = (cost, free.mask(nodes[:index]), known_in, known_out)
                    self._tensors.setdefault(place, []).append(entry)
            free.read(pins, inner[-1])

    def costs(self, place: int, words: Words) -> tuple[FloatArray, FloatArray]:
        """Returns the cost of the tensors newly cut with a free node in, and with it out."""
        count = words.shape[1]
        with_it, without = np.zeros(count), np.zeros(count)
        for touch, earlier, known_in, known_out in self._tensors.get(place, ()):
            if not known_in:
                with_it += touch * ~(words & earlier[:, None]).any(axis=0)
            if not known_out:
                without += touch * holds(words, earlier)
        return with_it, without


def holds(words: Words, mask: Words) -> NDArray[np.bool_]:
    """Tells which of some bit sets hold all of another one."""
    found = np.ones(words.shape[1], bool)
    for word in np.flatnonzero(mask).tolist():
        found &= (words[word] & mask[word]) == mask[word]
    return found
