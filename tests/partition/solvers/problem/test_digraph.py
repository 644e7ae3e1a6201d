"""Orders, cycles and strong components against those of networkx."""

from __future__ import annotations

import itertools

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.solvers.problem.digraph import (
    adjacency,
    find_cycle,
    strong_components,
    topological,
)

COUNT = 9
PAIRS = st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1))
EDGES = st.lists(PAIRS, max_size=20)


def oracle(edges):
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(COUNT))
    return graph


@given(EDGES)
def test_orders_are_the_smallest_topological_ones(edges):
    order = topological(*adjacency(COUNT, edges))
    graph = oracle(edges)
    if nx.is_directed_acyclic_graph(graph):
        assert order == list(nx.lexicographical_topological_sort(graph))
    else:
        assert len(order) < COUNT


@given(EDGES)
def test_a_cycle_is_one_of_the_graph(edges):
    cycle = find_cycle(adjacency(COUNT, edges)[0])
    assert bool(cycle) != nx.is_directed_acyclic_graph(oracle(edges))
    assert set(itertools.pairwise(cycle)) <= set(edges)
    assert cycle[:1] == cycle[-1:]


@given(EDGES)
def test_components_reach_each_other(edges):
    found = strong_components(*adjacency(COUNT, edges))
    expected = nx.strongly_connected_components(oracle(edges))
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_long_chains_need_no_recursion():
    count = 20_000
    ring = [(node, (node + 1) % count) for node in range(count)]
    assert len(strong_components(*adjacency(count, ring[:-1]))) == count
    assert len(strong_components(*adjacency(count, ring))) == 1
    assert len(find_cycle(adjacency(count, ring)[0])) == count + 1
