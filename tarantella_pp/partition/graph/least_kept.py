"""The least that a backward pass needs of a forward pass, if operations may be run again.

                  kept: what gradients read         kept: a minimum cut
    MatMul        y = x W                           y  [kept]
    Gelu          Erf(y), y * Erf(y), ...           made again of y
    MatMul        z = Gelu(y)  [all kept]           made again of y

PyTorch's compiler does so with its graphs (AOTAutograd); Jain et al., "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", 2020, has the theory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

FLOPS_PER_BYTE = 110.0
"""What keeping a byte is worth, unless it is said: about as much as takes no time.

Where it is worth no more, nothing dear is run again.
"""
# Operations, but for views, from which on a part of a graph may end where it is narrow: about a
# block of a transformer. What has to be kept is found for each part. Besides the largest value this
# share of it may be there, at the most.
LARGE_PART, NARROW = 40, 0.1


class Operation(NamedTuple):
    """One operation of a forward pass."""

    reads: tuple[Hashable, ...]  # the values that it is given
    makes: tuple[tuple[Hashable, float], ...]  # the values that it makes, and their bytes
    flops: float = math.inf  # what it takes to run it again; infinity where it cannot be
    dear: bool = False  # a product, a convolution, a pool, a function


class LeastKept(NamedTuple):
    """The values that are kept of a forward pass, and the operations that run again."""

    values: set[Hashable]
    again: set[int]  # places of operations


def least_kept(
    operations: Sequence[Operation], needed: Iterable[Hashable], flops_per_byte: Sequence[float]
) -> LeastKept:
    """Finds the values to keep: a minimum cut between values made once and values needed.

    An operation runs again where that takes fewer than its `flops_per_byte` for each byte that need
    not be kept; one with 0 never does, and with infinity it costs nothing. Operations are in the
    order in which they run; values that none of them makes are there anyway. Long lists are cut at
    narrow places, such as between two blocks of a transformer; the values there are kept, so that a
    backward pass repeats one part at a time.
    """
    if not any(flops_per_byte):
        return LeastKept(set(needed), set())
    known: dict[Hashable, tuple[list[int], list[int]]] = {}
    wanted, found = set(needed), LeastKept(set(), set())
    for begin, end, crossing in _parts(operations):
        prices = flops_per_byte[begin:end]
        # Dear operations are not repeated for what only later parts need.
        there = crossing if max(prices) > FLOPS_PER_BYTE else set()
        # Numbers instead of names, so that parts that are alike are cut once.
        names: dict[Hashable, int] = {}
        part = []
        for one, price in zip(operations[begin:end], prices, strict=True):
            reads = tuple(names.setdefault(value, len(names)) for value in one.reads)
            made = [(value, size) for value, size in one.makes if value not in there]
            makes = tuple((names.setdefault(value, len(names)), size) for value, size in made)
            part.append((reads, makes, _bytes_worth(one, price)))
        ends = tuple(n for value, n in names.items() if value in wanted or value in crossing)
        key = (tuple(part), ends)
        if key not in known:
            known[key] = _cut(part, ends)
        values, again = known[key]
        called = list(names)
        found.values.update(there, (called[number] for number in values))
        found.again.update(begin + place for place in again)
    return found


def _bytes_worth(one: Operation, flops_per_byte: float) -> float:
    """The bytes that it is worth to keep rather than to run an operation again."""
    if not flops_per_byte or (one.dear and flops_per_byte <= FLOPS_PER_BYTE):
        return math.inf
    return one.flops / flops_per_byte if one.flops < math.inf else math.inf


def _parts(operations: Sequence[Operation]) -> Iterator[tuple[int, int, set[Hashable]]]:
    """Yields where parts begin and end, and the values that later ones read."""
    last = {value: place for place, one in enumerate(operations) for value in one.reads}
    there: dict[Hashable, float] = {}
    begin = length = 0
    for place, one in enumerate(operations):
        length += one.flops > 0
        there |= dict(one.makes)
        for value in (*one.reads, *(value for value, _ in one.makes)):
            if last.get(value, -1) <= place:
                there.pop(value, None)
        if length >= LARGE_PART:
            largest = max(there.values(), default=0.0)
            if sum(there.values()) <= (1 + NARROW) * largest:
                yield begin, place + 1, set(there)
                begin, length = place + 1, 0
    if begin < len(operations):
        yield begin, len(operations), set()


def _cut(
    part: Sequence[tuple[tuple[int, ...], tuple[tuple[int, float], ...], float]],
    ends: Sequence[int],
) -> tuple[list[int], list[int]]:
    """The values to keep of some operations, and the places of those that run again."""
    import networkx as nx  # here, because keeping all that is needed takes no graph

    if not ends:
        return [], []
    graph = nx.DiGraph()
    # On the side of the end: operations that run again, and values that are there again. An edge
    # without a capacity cannot be cut: what runs again needs all that it reads.
    for place, (reads, makes, worth) in enumerate(part):
        again = {"capacity": worth} if worth < math.inf else {}
        graph.add_edge("start", ("run", place), **again)
        graph.add_edges_from((value, ("run", place)) for value in reads)
        for value, size in makes:
            graph.add_edge(("run", place), value, capacity=size)
    graph.add_edges_from((value, "end") for value in ends)
    flow = nx.algorithms.flow.boykov_kolmogorov
    _, (before, after) = nx.minimum_cut(graph, "start", "end", flow_func=flow)
    made_once = [place for place in range(len(part)) if ("run", place) in before]
    kept = [value for place in made_once for value, _ in part[place][1] if value in after]
    return kept, [place for place in range(len(part)) if ("run", place) in after]
