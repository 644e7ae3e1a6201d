from __future__ import annotations

import msgspec

from tarantella_pp.partition.graph.layer_graph import (
    LayerGraph,
    Node,
    Tensor,
    Weight,
)


def diamond(**changes):
    """Input -> a -> (b, c) -> d; b and d share a weight."""
    weights = (
        Weight(0, "a/kernel", (2, 3), "float32", True, 24),
        Weight(1, "shared/kernel", (3, 3), "float32", True, 36),
    )
    nodes = (
        Node(0, "a", "Dense", inputs=(0,), outputs=(1,), weights=(0,), parameters=24, keeps=(0,)),
        Node(1, "b", "Dense", inputs=(1,), outputs=(2,), weights=(1,), parameters=36),
        Node(2, "c", "ReLU", inputs=(1,), outputs=(3,)),
        Node(3, "b:1", "Dense", inputs=(2, 3), outputs=(4,), weights=(1,), parameters=36),
    )
    tensors = (
        Tensor(0, "x", (None, 2), "float32", None, (0,), 8),
        Tensor(1, "a", (None, 3), "float32", 0, (1, 2), 12, True),
        Tensor(2, "b", (None, 3), "float32", 1, (3,), 12, True),
        Tensor(3, "c", (None, 3), "float32", 2, (3,), 12, True),
        Tensor(4, "b:1", (None, 3), "float32", 3, (), 12, True),
    )
    graph = LayerGraph(nodes=nodes, tensors=tensors, inputs=(0,), outputs=(4,), weights=weights)
    return msgspec.structs.replace(graph, **changes)


def test_variables_that_change_in_a_call_keep_their_nodes_together():
    first, shared = diamond().weights
    stateful = diamond(weights=(first, msgspec.structs.replace(shared, stateful=True)))
    assert stateful.groups == (frozenset({1, 3}),)
    assert stateful.ties == {}


def test_variables_that_only_the_optimizer_changes_tie_their_nodes():
    assert diamond().groups == ()
    assert diamond().ties == {(1, 3): (1,)}
    assert diamond().users([0, 1, 1, 2]) == [(0,), (1, 2)]


def test_fingerprint_sees_structure_and_nothing_else():
    graph = diamond()
    prints = {graph.fingerprint()}
    a, b, c, d = graph.nodes
    frozen = tuple(msgspec.structs.replace(w, trainable=False, name="z") for w in graph.weights)
    renamed = msgspec.structs.replace(a, name="z", flops=5.0, parameters=0)
    same = msgspec.structs.replace(graph, nodes=(renamed, b, c, d), weights=frozen)
    assert same.fingerprint() in prints
    wider = msgspec.structs.replace(graph.tensors[1], shape=(None, 4))
    for changes in (
        {"nodes": (a, b, msgspec.structs.replace(c, kind="ELU"), d)},
        {"tensors": (graph.tensors[0], wider, *graph.tensors[2:])},
        {"nodes": (a, b, c, msgspec.structs.replace(d, weights=()))},
        {"outputs": (4, 3)},
    ):
        prints.add(msgspec.structs.replace(graph, **changes).fingerprint())
    assert len(prints) == 5
