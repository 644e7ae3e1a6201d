"""Exact reductions: from a problem to a smaller one with the same optimum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tarantella_pp.errors import GraphError
from tarantella_pp.partition.solvers.contraction import strong_owners
from tarantella_pp.partition.solvers.node_merging import MergedCosts, NodeMerger
from tarantella_pp.partition.solvers.problem.digraph import (
    adjacency,
    find_cycle,
    topological,
)
from tarantella_pp.partition.solvers.problem.instance import (
    Instance,
    Resource,
    Terms,
)
from tarantella_pp.partition.solvers.problem.problem import (
    IntArray,
    Problem,
    weighted_counts,
)


def reduce_problem(problem: Problem, *, together: bool = True, join: bool = True) -> Instance:
    """Fuses what must share a stage, joins what may share one, and drops what costs nothing."""
    n = problem.num_nodes
    edges = problem.precedence
    rank = _ranks(n, edges)
    owner = np.arange(n)
    priced = [] if together else [i for i, apart in enumerate(problem.apart) if apart]
    fused = [group for i, group in enumerate(problem.groups) if i not in priced]
    if priced:
        edges = np.vstack([edges, *(_holder_edges(problem.groups[i], rank) for i in priced)])
    if fused:
        owner = strong_owners(n, edges.tolist(), fused)
    joiner = NodeMerger(
        owner, edges, _drafts(problem, rank, priced), strict=problem.exactly or not join
    )
    joiner.run()
    return _instance(problem, joiner, rank)


def _drafts(problem: Problem, rank: IntArray, priced: Sequence[int]) -> list[MergedCosts]:
    zero = np.zeros(problem.num_nodes)
    memory = MergedCosts(problem, problem.static_memory, problem.activation_memory)
    for tensor in problem.tensors:
        if tensor.receive_bytes and tensor.producer is not None:
            memory.tensors.append((tensor.nodes, tensor.producer, 0.0, 0.0, tensor.receive_bytes))
    work = MergedCosts(problem, problem.work, zero)
    if problem.objective == "load":
        for tensor in problem.tensors:
            if tensor.comm:
                work.tensors.append((tensor.nodes, -1, tensor.comm, 0.0, 0.0))
    for index in priced:
        group = problem.groups[index]
        if problem.group_bytes:
            first = min(group, key=lambda node: rank[node])
            memory.tensors.append((group, first, 0.0, problem.group_bytes[index], 0.0))
    drafts = [memory] if problem.objective == "memory" else [work]
    if problem.limits is not None:
        memory.cap = problem.limits
        if problem.objective != "memory":
            drafts.append(memory)
    return drafts


def _ranks(n: int, edges: IntArray) -> IntArray:
    preds, succs = adjacency(n, edges.tolist())
    order = topological(preds, succs)
    if len(order) < n:
        path = " -> ".join(map(str, find_cycle(preds)))
        raise GraphError(f"The graph has a cycle, so it has no pipeline order: nodes {path}")
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    return rank


def _holder_edges(group: tuple[int, ...], rank: IntArray) -> IntArray:
    first = min(group, key=lambda node: rank[node], default=-1)
    pairs = [(first, node) for node in group if node != first]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _instance(problem: Problem, joiner: NodeMerger, rank: IntArray) -> Instance:
    alive = sorted(joiner.alive, key=lambda node: rank[node])
    number = {node: index for index, node in enumerate(alive)}
    preds = [[number[before] for before in joiner.preds[node]] for node in alive]
    succs = [[number[after] for after in joiner.succs[node]] for node in alive]
    order = topological(preds, succs)
    place_of = {alive[index]: place for place, index in enumerate(order)}
    owner = joiner.owners()
    place = np.array([place_of.get(int(node), -1) for node in owner], dtype=np.int64)
    renumber = np.empty(len(order), np.int64)
    renumber[order] = np.arange(len(order))
    resources = tuple(_resource(draft, place, len(order)) for draft in joiner.drafts)
    return Instance(
        num_stages=problem.num_stages,
        preds=tuple(tuple(sorted(int(renumber[b]) for b in preds[i])) for i in order),
        succs=tuple(tuple(sorted(int(renumber[a]) for a in succs[i])) for i in order),
        resources=resources,
        strict=problem.exactly,
        place=place,
    )


def _resource(draft: MergedCosts, place: IntArray, count: int) -> Resource:
    kept = place >= 0
    fixed = weighted_counts(place[kept], draft.fixed[kept], count)
    held = weighted_counts(place[kept], draft.held[kept], count)
    merged: dict[tuple[tuple[int, ...], int], list[float]] = {}
    for pins, producer, touch, receive, receive_held in draft.tensors:
        # Nodes that cost nothing carry no tensor here: they are dropped only without terms.
        nodes = tuple(sorted({int(place[pin]) for pin in pins} - {-1}))
        if len(nodes) > 1:
            maker = int(place[producer]) if producer >= 0 else -1
            cost = merged.setdefault((nodes, maker), [0.0, 0.0, 0.0])
            cost[0] += touch
            cost[1] += receive
            cost[2] += receive_held
    costs = np.array(list(merged.values())).reshape(-1, 3)
    terms = Terms(
        pins=tuple(key[0] for key in merged),
        producer=np.array([key[1] for key in merged], dtype=np.int64),
        touch=costs[:, 0].copy(),
        receive=costs[:, 1].copy(),
        receive_held=costs[:, 2].copy(),
    )
    return Resource(fixed, held, draft.factor, draft.scale, draft.cap, terms)


def expand(problem: Problem, instance: Instance, stages: IntArray) -> IntArray:
    """Gives every original node its stage."""
    place = instance.place
    full = np.where(place >= 0, stages[np.maximum(place, 0)] if len(stages) else 0, 0)
    if (place < 0).any():
        preds, succs = adjacency(problem.num_nodes, problem.precedence.tolist())
        for node in topological(preds, succs):
            if place[node] < 0 and preds[node]:
                full[node] = max(full[before] for before in preds[node])
    return full.astype(np.int64)


def shrink(instance: Instance, stages: Sequence[int]) -> IntArray | None:
    """Gives every node of an instance its stage in a plan of the original nodes."""
    kept = instance.place >= 0
    place, original = instance.place[kept], np.asarray(stages)[kept]
    own: IntArray = np.zeros(instance.num_nodes, np.int64)
    own[place] = original
    return own if (own[place] == original).all() else None


def cut_tensors(problem: Problem) -> list[tuple[tuple[int, ...], float]]:
    """Lists what cuts cost, to break ties: comm, or bytes where no tensor has comm."""
    by_comm = any(tensor.comm for tensor in problem.tensors)
    costs = [(t.nodes, t.comm if by_comm else t.bytes) for t in problem.tensors]
    return [(nodes, cost) for nodes, cost in costs if cost > 0 and len(nodes) > 1]
