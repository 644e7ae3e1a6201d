"""Buckets hold every trained variable once, on the stage that trains it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Weight
from tarantella_pp.partition.plan.gradient_buckets import (
    bucket_bytes,
    gradient_buckets,
    weight_replicas,
)
from tests.helpers.plans import chain_graph

CHAIN = chain_graph(6, 8)
"""Six kernels of 256 bytes."""


@st.composite
def graphs(draw: st.DrawFn) -> tuple[LayerGraph, list[int], int]:
    """Nodes in a line that share variables of two dtypes, and their stages."""
    num_stages = draw(st.integers(1, 4))
    stages = sorted(draw(st.lists(st.integers(0, num_stages - 1), min_size=1, max_size=8)))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    dtypes = st.sampled_from(["float32", "float16"])
    weights = tuple(
        Weight(i, f"w{i}", (size,), draw(dtypes), draw(st.booleans()), size)
        for i, size in enumerate(sizes)
    )
    some = st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=4)
    kinds = st.sampled_from(["Dense", "Embedding"])
    nodes = tuple(
        Node(i, f"n{i}", draw(kinds), weights=tuple(draw(some))) for i in range(len(stages))
    )
    return LayerGraph(nodes, (), (), (), weights), stages, num_stages


@given(graphs(), st.integers(1, 20))
def test_each_trained_variable_is_in_one_bucket_of_its_stage(drawn, most):
    graph, stages, num_stages = drawn
    buckets = gradient_buckets(graph, stages, num_stages, most)
    assert len(buckets) == num_stages
    users = [
        sorted({stages[n.id] for n in graph.nodes if w.id in n.weights}) for w in graph.weights
    ]
    trained = [w.id for w in graph.weights if w.trainable and users[w.id]]
    tables = {w for n in graph.nodes if n.kind == "Embedding" for w in n.weights}
    found = [w for own in buckets for bucket in own for w in bucket]
    assert sorted(found) == trained
    for stage, own in enumerate(buckets):
        tied = [any(len(users[w]) > 1 for w in bucket) for bucket in own]
        assert tied == sorted(tied)
        for bucket, size in zip(own, bucket_bytes(graph, own), strict=True):
            assert all(users[w][0] == stage for w in bucket)
            assert len({(graph.weights[w].dtype, len(users[w]) > 1) for w in bucket}) == 1
            assert size <= most or len(bucket) == 1
            assert len(bucket) == 1 or not tables.intersection(bucket)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (256, (((2,), (1,), (0,)), ((5,), (4,), (3,)))),
        (512, (((2, 1), (0,)), ((5, 4), (3,)))),
        (1, (((2,), (1,), (0,)), ((5,), (4,), (3,)))),
        (10**6, (((2, 1, 0),), ((5, 4, 3),))),
    ],
)
def test_the_last_layers_come_first(most, expected):
    assert gradient_buckets(CHAIN, [0, 0, 0, 1, 1, 1], 2, most) == expected


def fullest(sizes: list[int], owners: list[int], num_replicas: int) -> int:
    return max(
        sum(size for size, own in zip(sizes, owners, strict=True) if own == replica)
        for replica in range(num_replicas)
    )


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_no_replica_has_much_more_than_it_must(sizes: list[int], num_replicas: int) -> None:
    owners = weight_replicas(sizes, [0] * len(sizes), num_replicas)
    best = min(
        fullest(sizes, [*choice], num_replicas)
        for choice in itertools.product(range(num_replicas), repeat=len(sizes))
    )
    assert 3 * num_replicas * fullest(sizes, owners, num_replicas) <= (4 * num_replicas - 1) * best


def test_the_largest_weights_of_a_stage_are_apart() -> None:
    assert weight_replicas([4, 400, 4, 400, 300], [0] * 5, 2) == [1, 0, 1, 1, 0]
    assert weight_replicas([4, 400, 4, 400, 300], [0, 1, 0, 1, 2], 2) == [0, 0, 1, 1, 0]
    assert sorted(weight_replicas([0] * 6, [0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
