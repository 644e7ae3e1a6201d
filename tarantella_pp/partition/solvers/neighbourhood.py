"""Many plans near one: the ideals around each of its boundaries, recombined exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.chain import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.family import Family
from tarantella_pp.partition.solvers.ideals import Words, pack
from tarantella_pp.partition.solvers.instance import Instance


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a neighbourhood goes.

    Attributes:
        nodes: Nodes on either side of a boundary, along an order, that may change sides.
        ideals: Ideals kept at each boundary, those that cut least first.
    """

    nodes: int
    ideals: int


def recombine(
    instance: Instance, stages: IntArray, order: IntArray, reach: Reach, deadline: float
) -> IntArray | None:
    """Looks for a better plan whose every boundary is near one of a plan's boundaries.

    Around each boundary the nodes next to it along the order are free, the others stay; the
    ideals of the free nodes are listed, and the chain DP over all of them together finds the
    best combination: exponentially many plans at once.

    Args:
        instance: The instance.
        stages: The plan.
        order: A topological order that keeps its stages whole.
        reach: How far to go.
        deadline: `time.perf_counter()` at which to give up.

    Returns:
        The stages of a better plan, or None: there is none among them, or no time to tell.
    """
    value = instance.value(stages)
    n, S = instance.num_nodes, instance.num_stages
    sorted_stages = stages[order]
    groups = [pack(np.array([[False, True]] * n))]
    for boundary in range(1, S):
        cut = int(np.searchsorted(sorted_stages, boundary))
        if 0 < cut < n:
            low, high = max(0, cut - reach.nodes), min(n, cut + reach.nodes)
            inside = np.zeros(n, bool)
            inside[order[:low]] = True
            window = _Window(instance, boundary, value)
            groups.append(_ideals_near(instance, inside, order[low:high], window, reach.ideals))
            exact = np.zeros((n, 1), bool)
            exact[order[:cut]] = True
            groups.append(pack(exact))
    words = np.unique(np.concatenate(groups, axis=1), axis=1)
    family = ends_first_and_last(Family(instance, words), n)
    try:
        found = ChainSearch(family).run(value * (1 - 1e-9), deadline)
    except OutOfTimeError:
        return None
    return None if found is None else found[1]


def ends_first_and_last(family: Family, n: int) -> Family:
    """Sorts a family by size, as the chain search wants it.

    Args:
        family: A family with the empty and the full ideal.
        n: Number of nodes.

    Returns:
        The family, the empty ideal first and the full one last.
    """
    size = np.zeros(len(family), np.int64)
    for node in range(n):
        size += ((family.words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1)).astype(np.int64)
    return family.take(np.argsort(size, kind="stable"))


class _Window:
    """What an ideal must keep to end the first `boundary` stages of a plan below a value."""

    def __init__(self, instance: Instance, boundary: int, value: float) -> None:
        resource = instance.objective
        room = np.full(instance.num_stages, value) / resource.scale
        held = resource.factor.min()
        self.weight = resource.alpha + held * resource.beta
        self.most = float(room[:boundary].sum())
        self.least = float(self.weight.sum() - room[boundary:].sum())


def _ideals_near(
    instance: Instance, inside: NDArray[np.bool_], free: IntArray, window: _Window, limit: int
) -> Words:
    """Lists ideals that hold `inside` and some of the free nodes, a topological order of them.

    Node by node, each partial choice goes on without the node and, where its predecessors are
    in, with it. A tensor with a chosen pin in and one out is cut for good: choices whose work
    and cut no longer fit the window are dropped, and of too many those that cut least are kept.
    """
    n = instance.num_nodes
    words = pack(inside[:, None])
    cut = np.zeros(1)
    held = np.full(1, float(window.weight[inside].sum()))
    left = float(window.weight[free].sum())
    pricer = _CutPricer(instance, inside, free)
    for node in free.tolist():
        ready = np.ones(words.shape[1], bool)
        for before in instance.preds[node]:
            ready &= _has(words, before)
        with_it, without = pricer.steps(node, words)
        weight = float(window.weight[node])
        left -= weight
        gone = cut + without
        stays = np.flatnonzero((held + left >= window.least + gone) & (held + gone <= window.most))
        more = cut + with_it
        fits = (held + weight + more <= window.most) & (held + weight + left >= window.least + more)
        grows = np.flatnonzero(ready & fits)
        grown = words[:, grows].copy()
        grown[node >> 6] |= np.uint64(1 << (node & 63))
        words = np.concatenate([words[:, stays], grown], axis=1)
        cut = np.concatenate([gone[stays], more[grows]])
        held = np.concatenate([held[stays], held[grows] + weight])
        if len(cut) > limit:
            kept = _fairest(cut, limit)
            words, cut, held = words[:, kept], cut[kept], held[kept]
    return words if words.shape[1] else np.zeros((max(1, (n + 63) // 64), 0), np.uint64)


def _fairest(cut: FloatArray, limit: int) -> NDArray[np.intp]:
    """Keeps those that cut least; among equals, evenly many from everywhere."""
    spread = (np.arange(len(cut)) * 0x9E3779B1) & 0xFFFFFFFF
    return np.sort(np.lexsort((spread, cut))[:limit])


def _has(words: Words, node: int) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = ((words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1)) > 0
    return bits


class _CutPricer:
    """What it costs to put the next node in or to leave it out, given all earlier choices."""

    def __init__(self, instance: Instance, inside: NDArray[np.bool_], free: IntArray) -> None:
        place = np.full(instance.num_nodes, -1, np.int64)
        place[free] = np.arange(len(free))
        self._place = place
        self._inside = inside
        self._of: dict[int, list[tuple[float, list[int], bool, bool]]] = {}
        terms = instance.objective.terms
        for pins, touch in zip(terms.pins, terms.touch.tolist(), strict=True):
            known_in = any(inside[pin] for pin in pins)
            known_out = any(place[pin] < 0 and not inside[pin] for pin in pins)
            if known_in and known_out:
                continue
            for pin in pins:
                if place[pin] >= 0:
                    earlier = [other for other in pins if 0 <= place[other] < place[pin]]
                    if earlier or known_in or known_out:
                        entry = (touch, earlier, known_in, known_out)
                        self._of.setdefault(pin, []).append(entry)

    def steps(self, node: int, words: Words) -> tuple[FloatArray, FloatArray]:
        """Returns the cost of the tensors newly cut with the node in, and with it out."""
        count = words.shape[1]
        with_it, without = np.zeros(count), np.zeros(count)
        for touch, earlier, known_in, known_out in self._of.get(node, ()):
            some, every = np.full(count, known_in), np.full(count, not known_out)
            for pin in earlier:
                bit = _has(words, pin)
                some |= bit
                every &= bit
            with_it += touch * ~some
            without += touch * every
        return with_it, without
