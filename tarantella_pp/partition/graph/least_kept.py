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
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

FLOPS_PER_BYTE = 110.0
"""What keeping a byte is worth, unless it is said: about as much as takes no time."""
MOST_FOR_CHEAP = 250.0
"""What keeping a byte may be worth at the most, so that nothing dear is run again."""


class Operation(NamedTuple):
    """One operation of a forward pass."""

    reads: tuple[Hashable, ...]  # the values that it is given
    makes: tuple[tuple[Hashable, float], ...]  # the values that it makes, and their bytes
    flops: float = math.inf  # what it takes to run it again; infinity where it cannot be
    dear: bool = False  # a product, a convolution, a pool, a function


def least_kept(
    operations: Sequence[Operation], needed: Iterable[Hashable], flops_per_byte: float
) -> set[Hashable]:
    """Finds the values to keep: a minimum cut between values made once and values needed.

    An operation runs again where that takes fewer than `flops_per_byte` for each byte that need not
    be kept; up to `MOST_FOR_CHEAP` nothing dear does. 0 keeps all that is needed, infinity as few
    bytes as possible. Values that no operation makes are there anyway.
    """
    import networkx as nx  # here, because keeping all that is needed takes no graph

    if not flops_per_byte:
        return set(needed)
    worth, price = (flops_per_byte, 1.0) if math.isfinite(flops_per_byte) else (1.0, 0.0)
    graph = nx.DiGraph()
    # On the side of the end: operations that run again, and values that are there again. An edge
    # without a capacity cannot be cut: what runs again needs all that it reads.
    for place, one in enumerate(operations):
        repeatable = one.flops < math.inf and not (one.dear and flops_per_byte <= MOST_FOR_CHEAP)
        again = {"capacity": price * one.flops} if repeatable else {}
        graph.add_edge("start", place, **again)
        graph.add_edges_from((("value", value), place) for value in one.reads)
        for value, size in one.makes:
            graph.add_edge(place, ("value", value), capacity=worth * size)
    graph.add_edges_from((("value", value), "end") for value in needed)
    if "end" not in graph:
        return set()
    flow = nx.algorithms.flow.boykov_kolmogorov
    _, (before, after) = nx.minimum_cut(graph, "start", "end", flow_func=flow)
    return {
        value
        for place, one in enumerate(operations)
        if place in before
        for value, _ in one.makes
        if ("value", value) in after
    }
