"""Memory of the backward pass, of messages, of updates, and of gradients between replicas."""

from __future__ import annotations

import keras
import msgspec
import pytest
from keras import layers

from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.graph.units import wire_bytes
from tarantella_pp.partition.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.peak_memory import (
    GradientSums,
    backward_bytes,
    message_bytes,
    update_bytes,
)
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.partition.stage_costs import StageCostModel
from tests.helpers.runner import random_stages
from tests.zoo import models

pytestmark = pytest.mark.keras

KERNEL = 16 * 16 * 4


def graph_of(*steps):
    x = inputs = keras.Input((16,))
    for step in steps:
        x = step(x)
    return extract(keras.Model(inputs, x)).graph


def dense(activation=None):
    return layers.Dense(16, activation, use_bias=False)


def played(graph, rows=10):
    return backward_bytes(graph, graph.nodes, rows)


def test_one_operation_has_the_gradients_of_its_output_input_and_weights():
    row = 16 * 4
    assert played(graph_of(dense())) == 10 * row + KERNEL  # the model's input has no gradient
    assert played(graph_of(dense(), dense())) == 2 * 10 * row + KERNEL


def test_a_chain_needs_no_more_than_its_largest_pair():
    chain = [dense() for _ in range(6)]
    assert played(graph_of(*chain)) == played(graph_of(*chain[:2]))
    wide = graph_of(dense(), layers.Dense(100, use_bias=False), dense())
    assert played(wide) == 10 * 4 * (16 + 100) + 16 * 100 * 4


def test_what_an_activation_function_kept_makes_room():
    linear, kinked = (played(graph_of(dense(), dense(kind))) for kind in (None, "relu"))
    assert linear - kinked == 10 * 16 * 4


def test_gradients_wait_for_other_branches():
    graph = extract(models.one_skip()).graph
    of_sum, branch, skip = 3 * [1000 * 6 * 4]
    assert backward_bytes(graph, graph.nodes, 1000) == of_sum + branch + skip
    weights = (6 * 6 + 6) * 4
    assert backward_bytes(graph, graph.nodes[:-1], 1000) == branch + weights


def test_views_have_one_gradient():
    inner = [layers.Reshape((4, 4)), layers.Flatten()]
    assert played(graph_of(dense(), *inner, dense())) == played(graph_of(dense(), dense()))


def test_frozen_layers_have_no_gradients():
    graph = extract(models.frozen_start()).graph
    assert backward_bytes(graph, graph.nodes[:2], 5) == 0


@pytest.mark.parametrize(("count", "copies"), [(3, 3), (5, 5), (9, 5)])
def test_an_update_has_temporaries_of_a_few_variables(count, copies):
    graph = graph_of(*[dense() for _ in range(count)])
    slots = optimizer_state_bytes("adam", graph.weights)
    assert update_bytes(graph, graph.weights, slots) == copies * KERNEL


@pytest.mark.parametrize(("optimizer", "copies"), [("adam", 3.5), ("sgd", 0), ("lion", 1.75)])
def test_sparse_gradients_become_dense_for_each_slot(optimizer, copies):
    ids = keras.Input((3,), dtype="int32")
    graph = extract(keras.Model(ids, layers.Embedding(50, 8)(ids))).graph
    slots = optimizer_state_bytes(optimizer, graph.weights)
    assert update_bytes(graph, graph.weights, slots) == copies * 50 * 8 * 4


def test_the_update_counts_where_it_needs_more_than_activations():
    graph = graph_of(*[dense() for _ in range(4)])
    costs = StageCostModel(graph, optimizer_state_bytes("adam", graph.weights), micro_batch_size=2)
    (stage,) = costs.stages([0] * 4, [1])
    assert stage.activation_bytes_total == 4 * 2 * 16 * 4
    assert stage.working_bytes == 4 * KERNEL - stage.activation_bytes_total
    (busy,) = costs.stages([0] * 4, [100])
    assert busy.working_bytes == backward_bytes(graph, graph.nodes, 2)


def cut(source, *targets, name="x", size=100, **more):
    return CutEdge(name, source, targets, "float32", size, **{"has_gradient": True, **more})


CHAIN = [cut(0, 1, name="a"), cut(1, 2, name="b")]


@pytest.mark.parametrize(
    ("cuts", "stage", "kept", "received", "sent", "returned"),
    [
        (CHAIN, 0, "", 100 + 100, 3 * 100, 0),  # one gradient ahead, one in use
        (CHAIN, 0, "a", 100 + 100, 0, 0),  # what is kept anyway waits at no cost
        (CHAIN, 1, "", 100 + 100 + 100, 3 * 100, 0),  # one ahead, one of each in use
        (CHAIN, 1, "a", 100 + 100, 3 * 100, 0),
        (CHAIN, 2, "b", 100, 0, 2 * 100),  # one activation ahead, two gradients on their way
        (CHAIN, 3, "", 0, 0, 0),
        ([cut(0, 1, 2)], 0, "x", 100 + 200, 0, 0),  # a gradient of each reader
        ([cut(0, 1, has_gradient=False)], 0, "x", 0, 0, 0),
        ([cut(0, 1, has_gradient=False)], 1, "x", 100, 0, 0),
        ([cut(0, 1, mask_bytes=5)], 1, "x", 105 + 5, 0, 200),
    ],
)
def test_messages_are_there_until_used_and_received(cuts, stage, kept, received, sent, returned):
    assert message_bytes(cuts, stage, 3, set(kept)) == (received, sent, returned)
    assert message_bytes(cuts, stage, 3, set(kept), window=2) == (received, sent, returned)
    assert message_bytes(cuts, stage, 1667, set(kept), window=2) == (received, sent, returned)


@pytest.mark.parametrize(
    ("cuts", "stage", "kept", "received", "sent", "returned"),
    [
        (CHAIN, 0, "", 50 + 100, 3 * 50 + 100, 0),  # as wide as before where it is made and used
        (CHAIN, 0, "a", 50 + 100, 3 * 50, 0),  # what is sent is not what is kept
        (CHAIN, 1, "", 50 + 100 + 100, 3 * 50 + 100, 0),
        (CHAIN, 2, "b", 50, 0, 2 * 50),
        ([cut(0, 1, 2, mask_bytes=5)], 0, "x", 50 + 200, 3 * 105, 0),  # narrower for each
        ([cut(0, 1, 2, mask_bytes=5)], 0, "", 50 + 200, 3 * 105 + 100, 0),
        ([cut(0, 1, mask_bytes=5)], 1, "x", 55 + 5, 0, 100),
    ],
)
def test_messages_may_be_narrower(cuts, stage, kept, received, sent, returned):
    found = message_bytes(cuts, stage, 3, set(kept), sent_as="bfloat16")
    assert found == (received, sent, returned)


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16", "bool"])
@pytest.mark.parametrize("kept", ["", "x"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_messages_that_are_narrow_anyway_count_as_without(dtype, kept, stage):
    cuts = [msgspec.structs.replace(cut(0, 1, 2, mask_bytes=5), dtype=dtype)]
    found = message_bytes(cuts, stage, 3, set(kept), sent_as="bfloat16")
    assert found == message_bytes(cuts, stage, 3, set(kept))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 80), ("float64", 40), ("float16", 160), ("bfloat16", 160), ("int32", 160)],
)
def test_only_wider_floats_travel_as_bfloat16(dtype, size):
    assert wire_bytes(160, dtype, "bfloat16") == size
    assert wire_bytes(160, dtype, None) == 160


def test_stages_that_send_shapes_first_have_no_window():
    graph = graph_of(*[dense() for _ in range(4)])
    tensors = tuple(msgspec.structs.replace(t, rows_per_sample=None) for t in graph.tensors)
    unsure = msgspec.structs.replace(graph, tensors=tensors)

    def sends(graph, window):
        slots = [0] * len(graph.weights)
        costs = StageCostModel(graph, slots, micro_batch_size=2, window=window)
        return costs.stages([0, 0, 1, 1], [500, 500])[0].working_bytes

    assert sends(graph, 4) < sends(graph, None) == sends(unsure, None) == sends(unsure, 4)


def test_stages_that_recompute_keep_what_they_receive():
    graph = graph_of(dense(), dense(), dense())
    costs = StageCostModel(
        graph, optimizer_state_bytes("sgd", graph.weights), micro_batch_size=1000
    )
    plain, again = (costs.stages([0, 1, 2], [3, 2, 1], repeats)[1] for repeats in ({}, {1: 1}))
    assert plain.buffer_bytes == again.buffer_bytes == 2 * 1000 * 16 * 4
    assert again.activation_bytes_total == plain.activation_bytes_total == 2 * 1000 * 16 * 4


ROWS = 6
WAYS = [
    GradientSums(2),
    GradientSums(3, gradient_dtype="bfloat16"),
    GradientSums(2, sharded=True),
    GradientSums(3, sharded=True),
    GradientSums(3, sharded=True, gradient_dtype="bfloat16", fusion_threshold=100),
]
READ = {build.__name__: extract(build()).graph for build in models.READ}


@pytest.mark.parametrize(
    ("sums", "share", "copies"),
    [
        (GradientSums(1), 1.0, 0),
        (GradientSums(2), 1.0, 1 + 1),  # packed, and the sum
        (GradientSums(5), 1.0, 1 + 1),
        (GradientSums(5, fusion_threshold=1), 1.0, 1),  # each alone in its bucket
        (GradientSums(5, gradient_dtype="bfloat16"), 1.0, 1 + 0.5 + 0.5 + 1),
        (GradientSums(3, sharded=True), 1.0, 1 + 2),  # packed, and what two others send
        (GradientSums(3, sharded=True), 0.0, 1 + 1),  # packed, and the new value
        (GradientSums(3, sharded=True, fusion_threshold=1), 0.5, 2 * 0.5 + 0.5),
        (GradientSums(3, True, 1, "bfloat16"), 1.0, 2 * 0.5 + 0.5 + 1),
        (GradientSums(3, True, 1, "bfloat16"), 0.0, 0.5 + 1),
        (GradientSums(3, gradient_dtype="float32"), 1.0, 1 + 1),  # as it is
    ],
)
def test_copies_of_a_weight(sums, share, copies):
    graph = extract(models.mlp()).graph
    found = sums.weight_bytes(graph, ROWS, share)
    assert found == [copies * weight.bytes for weight in graph.weights]


def test_the_gradient_of_a_table_is_the_rows_that_all_replicas_look_up():
    graph = extract(models.embedding_with_mask()).graph
    table, *rest = graph.weights
    ids = 5
    assert table.shape == (6, 4)
    plain, shared_out = (
        GradientSums(2, sharded).weight_bytes(graph, ROWS, 0.25) for sharded in (False, True)
    )
    rows = 2 * ROWS * ids
    assert plain[0] == rows * (4 * 4 + 8)
    assert shared_out[0] == plain[0] + 0.75 * table.bytes
    narrow = GradientSums(2, gradient_dtype="bfloat16").weight_bytes(graph, ROWS, 1.0)
    assert narrow[0] == rows * (4 * 2 + 8)
    assert plain[1:] == [2 * weight.bytes for weight in rest]


@pytest.mark.parametrize("build", [models.tied_variable, models.tied_head])
def test_a_table_that_is_multiplied_has_a_dense_gradient(build):
    graph = extract(build()).graph
    dense = GradientSums(2, fusion_threshold=1).weight_bytes(graph, ROWS, 1.0)
    assert dense == [weight.bytes for weight in graph.weights]


def test_frozen_weights_stay_where_they_are():
    graph = extract(models.frozen_start()).graph
    for sums in WAYS:
        for size, weight in zip(sums.weight_bytes(graph, ROWS, 0.5), graph.weights, strict=True):
            assert (size > 0) == weight.trainable


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("sums", WAYS, ids=str)
def test_stages_have_what_the_weights_that_they_train_have(name, sums):
    """Of the replica with most of it, added up weight by weight; all else is as without."""
    graph = READ[name]
    slots = optimizer_state_bytes(None, graph.weights)
    shards = sums.replicas if sums.sharded else 1
    costs = StageCostModel(graph, slots, 3, None, ROWS // 3, shards=shards, sums=sums)
    alone = StageCostModel(graph, slots, 3, None, ROWS // 3, shards=shards)
    for seed in range(4):
        assignment = random_stages(graph, 3, seed)
        if set(assignment) != {0, 1, 2}:
            continue
        users, held = graph.users(assignment), [3, 2, 1]
        owners = costs.replicas(users)
        mean = costs.reduction_bytes()
        stages, before = costs.stages(assignment, held), alone.stages(assignment, held)
        for number, (stage, without) in enumerate(zip(stages, before, strict=True)):
            own = [w.id for w in graph.weights if users[w.id] and users[w.id][0] == number]
            each = []
            for replica in range(shards):
                sizes = [sums.weight_bytes(graph, ROWS, share) for share in (0.0, 1.0)]
                each.append(sum(sizes[owners[w] == replica][w] for w in own))
            assert max(each) <= stage.reduction_bytes < max(each) + 1
            assert stage.reduction_bytes >= sum(mean[w] for w in own) - 1e-6
            assert msgspec.structs.replace(stage, reduction_bytes=0) == without
            assert stage.memory_bytes == without.memory_bytes + stage.reduction_bytes
