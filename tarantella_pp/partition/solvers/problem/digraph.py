"""Directed graphs as lists of neighbours: orders, cycles and strong components."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterable, Sequence

Neighbours = list[list[int]]


def adjacency(count: int, edges: Iterable[tuple[int, int]]) -> tuple[Neighbours, Neighbours]:
    """Lists the neighbours of each node."""
    preds: Neighbours = [[] for _ in range(count)]
    succs: Neighbours = [[] for _ in range(count)]
    for before, after in edges:
        preds[after].append(before)
        succs[before].append(after)
    return preds, succs


def topological(preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]) -> list[int]:
    """Orders nodes, smallest number first among the ready ones."""
    waiting = [len(before) for before in preds]
    ready = [node for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for after in succs[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, after)
    return order


def find_cycle(preds: Sequence[Sequence[int]]) -> list[int]:
    """Looks for a cycle."""
    try:
        graphlib.TopologicalSorter(dict(enumerate(preds))).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def strong_components(
    preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Finds the largest sets of nodes that all reach each other.

    Two depth-first walks (Sharir, "A strong-connectivity algorithm and its applications in data
    flow analysis", 1981): what still reaches the node finished last forms a component with it.
    """
    components = []
    free = [True] * len(preds)
    for root in reversed(_finished(succs)):
        if not free[root]:
            continue
        free[root] = False
        component = [root]
        for node in component:
            for before in preds[node]:
                if free[before]:
                    free[before] = False
                    component.append(before)
        components.append(component)
    return components


def _finished(succs: Sequence[Sequence[int]]) -> list[int]:
    """Lists nodes as a depth-first walk leaves them."""
    order = []
    fresh = [True] * len(succs)
    for root in range(len(succs)):
        if not fresh[root]:
            continue
        fresh[root] = False
        path = [(root, iter(succs[root]))]
        while path:
            node, afters = path[-1]
            after = next((one for one in afters if fresh[one]), None)
            if after is None:
                order.append(node)
                path.pop()
            else:
                fresh[after] = False
                path.append((after, iter(succs[after])))
    return order
