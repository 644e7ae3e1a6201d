"""Fusing nodes that no better plan can separate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tarantella_pp.partition.solvers.problem.digraph import (
    adjacency,
    strong_components,
    topological,
)
from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    INPUT,
    Instance,
    Resource,
    Terms,
)
from tarantella_pp.partition.solvers.problem.problem import IntArray, weighted_counts


def strong_owners(
    n: int, edges: Iterable[tuple[int, int]], sets: Iterable[Iterable[int]]
) -> IntArray:
    """Names for each node the one that stands for all that must share its stage.

    Nodes of a set must, and so must whatever lies on a path between two of them.
    """
    pairs = list(edges)
    for one in sets:
        # A ring makes the set one strong component, with whatever lies between its nodes.
        ring = list(one)
        pairs += zip(ring, [*ring[1:], *ring[:1]], strict=True)
    owner = np.arange(n)
    for component in strong_components(*adjacency(n, pairs)):
        owner[component] = min(component)
    return owner


def contract(instance: Instance, sets: Iterable[Iterable[int]]) -> tuple[Instance, IntArray]:
    """Fuses sets of nodes, and what lies between them."""
    n = instance.num_nodes
    edges = [(node, after) for node in range(n) for after in instance.succs[node]]
    owner = strong_owners(n, edges, sets)
    return quotient(instance, owner)


def quotient(instance: Instance, owner: IntArray) -> tuple[Instance, IntArray]:
    """Makes one node of all nodes with the same owner."""
    _, part = np.unique(owner, return_inverse=True)
    count = int(part.max()) + 1
    preds: list[set[int]] = [set() for _ in range(count)]
    succs: list[set[int]] = [set() for _ in range(count)]
    for node, afters in enumerate(instance.succs):
        for after in afters:
            before, behind = int(part[node]), int(part[after])
            if before != behind:
                succs[before].add(behind)
                preds[behind].add(before)
    order = topological([sorted(p) for p in preds], [sorted(s) for s in succs])
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    place = number[part]
    smaller = replace(
        instance,
        preds=tuple(tuple(sorted(int(number[p]) for p in preds[i])) for i in order),
        succs=tuple(tuple(sorted(int(number[s]) for s in succs[i])) for i in order),
        resources=tuple(_fused(resource, place, count) for resource in instance.resources),
        place=np.where(instance.place >= 0, place[np.maximum(instance.place, 0)], -1),
    )
    return smaller, place


def _fused(resource: Resource, place: IntArray, count: int) -> Resource:
    terms = resource.terms
    merged: dict[tuple[tuple[int, ...], int], list[float]] = {}
    for t, pins in enumerate(terms.pins):
        nodes = tuple(sorted({int(place[pin]) for pin in pins}))
        if len(nodes) > 1:
            producer = int(terms.producer[t])
            maker = producer if producer in (INPUT, ANY) else int(place[producer])
            cost = merged.setdefault((nodes, maker), [0.0, 0.0, 0.0])
            cost[0] += terms.touch[t]
            cost[1] += terms.receive[t]
            cost[2] += terms.receive_held[t]
    costs = np.array(list(merged.values())).reshape(-1, 3)
    return replace(
        resource,
        fixed=weighted_counts(place, resource.fixed, count),
        held=weighted_counts(place, resource.held, count),
        terms=Terms(
            pins=tuple(key[0] for key in merged),
            producer=np.array([key[1] for key in merged], dtype=np.int64),
            touch=costs[:, 0].copy(),
            receive=costs[:, 1].copy(),
            receive_held=costs[:, 2].copy(),
        ),
    )


def fuse_uncuttable(instance: Instance, upper: float) -> tuple[Instance, IntArray]:
    """Fuses the nodes of every tensor that a plan better than `upper` cannot cut.

    The stage that holds the heaviest node of a cut tensor pays that node and the tensor; all
    stages together pay all nodes and the tensor at least twice.
    """
    place = np.arange(instance.num_nodes)
    if instance.strict:
        return instance, place
    while True:
        resource = instance.objective
        terms = resource.terms
        scale = float(resource.scale.min())
        weight = resource.fixed + resource.factor.min() * resource.held
        room = upper * float((1 / resource.scale).sum()) - float(weight.sum())
        sets = [
            pins
            for pins, touch in zip(terms.pins, terms.touch.tolist(), strict=True)
            if scale * (touch + max(weight[pin] for pin in pins)) > upper * (1 + 1e-9)
            or 2 * touch > room + 1e-9 * upper
        ]
        if not sets:
            return instance, place
        instance, moved = contract(instance, sets)
        place = moved[place]
