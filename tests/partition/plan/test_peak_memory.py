"""Memory of the backward pass, of messages, of updates, and of gradients between replicas."""

from dataclasses import replace

import msgspec
import pytest
from keras import layers

from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.graph.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.graph.units import wire_bytes
from tarantella_pp.partition.plan import peak_memory
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.schedule import HeldAgain
from tests.helpers.plans import costs_of
from tests.zoo import models

pytestmark = pytest.mark.keras

KERNEL = 16 * 16 * 4
READ = {build.__name__: extract(build()).graph for build in (
    models.mlp, models.embedding_with_mask, models.tied_variable, models.tied_head,
    models.frozen_start, models.batch_norm_cnn, models.nested_twice,
)}  # fmt: skip


def graph_of(*steps):
    return extract(models.chain((16,), *steps)).graph


def dense(activation=None):
    return layers.Dense(16, activation, use_bias=False)


def played(graph, rows=10):
    return peak_memory.BackwardPass(graph).bytes(range(len(graph.nodes)), rows)


def test_gradients_are_there_from_their_readers_to_their_producers():
    row, kernel = 10 * 16 * 4, KERNEL
    assert played(graph_of(dense())) == row + kernel  # the model's input has no gradient
    two = played(graph_of(dense(), dense()))
    assert two == 2 * row + kernel
    assert played(graph_of(*[dense() for _ in range(6)])) == two  # the largest pair
    wide = graph_of(dense(), layers.Dense(100, use_bias=False), dense())
    assert played(wide) == 10 * 4 * (16 + 100) + 16 * 100 * 4
    views = [layers.Reshape((4, 4)), layers.Flatten()]
    assert played(graph_of(dense(), *views, dense())) == two  # have one gradient
    # What an activation function has kept makes room.
    assert two - played(graph_of(dense(), dense("relu"))) == row


def test_gradients_wait_for_other_branches_and_frozen_layers_have_none():
    graph = extract(models.one_skip()).graph
    of_sum, branch, skip = 3 * [1000 * 6 * 4]
    assert played(graph, 1000) == of_sum + branch + skip
    weights, but_sum = (6 * 6 + 6) * 4, range(len(graph.nodes) - 1)
    assert peak_memory.BackwardPass(graph).bytes(but_sum, 1000) == branch + weights
    assert peak_memory.BackwardPass(READ["frozen_start"]).bytes(range(2), 5) == 0


def test_cheap_results_that_are_made_again_of_one_another_are_there_at_once():
    sizes = []
    for count in (2, 6):
        graph = graph_of(dense(), *[layers.Activation("sigmoid") for _ in range(count)], dense())
        costs = costs_of(graph, 1000, slots=[0] * len(graph.weights), flops_per_byte=1e3)
        (stage,) = costs.stages([0] * len(graph.nodes))
        sizes.append((stage.activation_bytes, stage.working_bytes))
    (kept, few), (same, many) = sizes
    assert kept == same
    assert many - few == 4 * 1000 * 16 * 4


@pytest.mark.parametrize(("count", "copies"), [(3, 3), (5, 5), (9, 5)])
def test_an_update_has_temporaries_of_a_few_variables(count, copies):
    graph = graph_of(*[dense() for _ in range(count)])
    slots = optimizer_state_bytes("adam", graph.weights)
    assert peak_memory.update_bytes(graph, graph.weights, slots) == copies * KERNEL


@pytest.mark.parametrize(("optimizer", "copies"), [("adam", 3.5), ("sgd", 0), ("lion", 1.75)])
def test_sparse_gradients_become_dense_for_each_slot(optimizer, copies):
    graph = READ["embedding_with_mask"]
    table = [weight for weight in graph.weights if weight.id in graph.looked_up]
    slots = optimizer_state_bytes(optimizer, graph.weights)
    assert peak_memory.update_bytes(graph, table, slots) == copies * sum(
        weight.bytes for weight in table
    )


def test_the_update_counts_where_it_needs_more_than_activations():
    graph = graph_of(*[dense() for _ in range(4)])
    costs = costs_of(graph, 2)
    (stage,) = costs.stages([0] * 4)
    assert stage.activation_bytes_total == 4 * 2 * 16 * 4
    assert stage.working_bytes == 4 * KERNEL - stage.activation_bytes_total
    (busy,) = replace(costs, in_flight=[100]).stages([0] * 4)
    assert busy.working_bytes == played(graph, 2)


def cut(source, *targets, name="x", size=100, **more):
    return CutEdge(name, source, targets, "float32", size, **{"has_gradient": True, **more})


CHAIN = [cut(0, 1, name="a"), cut(1, 2, name="b")]


@pytest.mark.parametrize(
    ("sent_as", "cuts", "stage", "kept", "received", "sent", "returned"),
    [
        (None, CHAIN, 0, "", 100 + 100, 3 * 100, 0),  # one gradient ahead, one in use
        (None, CHAIN, 0, "a", 100 + 100, 0, 0),  # what is kept anyway waits at no cost
        (None, CHAIN, 1, "", 100 + 100 + 100, 3 * 100, 0),  # one ahead, one of each in use
        (None, CHAIN, 1, "a", 100 + 100, 3 * 100, 0),
        (None, [cut(0, 1, 2)], 0, "x", 100 + 200, 0, 0),  # a gradient of each reader
        (None, [cut(0, 1, has_gradient=False)], 1, "x", 100, 0, 0),
        (None, [cut(0, 1, mask_bytes=5)], 1, "x", 105 + 5, 0, 200),
        ("bfloat16", CHAIN, 0, "", 50 + 100, 3 * 50 + 100, 0),  # as wide as before where made
        ("bfloat16", CHAIN, 0, "a", 50 + 100, 3 * 50, 0),  # what is sent is not what is kept
        ("bfloat16", [cut(0, 1, 2, mask_bytes=5)], 0, "x", 50 + 200, 3 * 105, 0),  # for each
        ("bfloat16", [cut(0, 1, mask_bytes=5)], 1, "x", 55 + 5, 0, 100),
    ],
)
def test_messages_are_there_until_used_and_received(
    sent_as, cuts, stage, kept, received, sent, returned
):
    def as_sent(cut):
        return wire_bytes(cut.bytes, cut.dtype, sent_as)

    for count, window in ((3, None), (3, 2), (1667, 2)):
        found = peak_memory.message_bytes(cuts, stage, count, set(kept), as_sent, window)
        assert found == (received, sent, returned)


def test_stages_that_send_shapes_first_have_no_window():
    graph = graph_of(*[dense() for _ in range(4)])
    tensors = tuple(msgspec.structs.replace(t, rows_per_sample=None) for t in graph.tensors)
    unsure = msgspec.structs.replace(graph, tensors=tensors)

    def sends(graph, schedule):
        options = {"num_stages": 2, "schedule": schedule, "slots": [0] * len(graph.weights)}
        return costs_of(graph, 2, [500, 500], **options).stages([0, 0, 1, 1])[0].working_bytes

    window, none = "gpipe", "1f1b"
    assert sends(graph, window) < sends(graph, none) == sends(unsure, none) == sends(unsure, window)


def test_stages_that_recompute_keep_what_they_receive():
    graph = graph_of(dense(), dense(), dense())
    costs = costs_of(graph, 1000, [3, 2, 1], slots=[0] * len(graph.weights))
    config = msgspec.structs.replace(costs.config, recompute=(1,))
    every = [costs, replace(costs, config=config, held_again=[HeldAgain(1)] * 3)]
    plain, again = (one.stages([0, 1, 2])[1] for one in every)
    assert plain.buffer_bytes == again.buffer_bytes == 2 * 1000 * 16 * 4
    assert again.activation_bytes_total == plain.activation_bytes_total == 2 * 1000 * 16 * 4


ROWS = 6


def reduced(graph, share, **options):
    return peak_memory.reduction_bytes(graph, costs_of(graph, ROWS, **options).config, share)


@pytest.mark.parametrize(
    ("replicas", "sharded", "threshold", "dtype", "share", "copies"),
    [
        (2, False, 999, None, 1.0, 1 + 1),  # packed, and the sum
        (5, False, 1, None, 1.0, 1),  # each alone in its bucket
        (5, False, 999, "bfloat16", 1.0, 1 + 0.5 + 0.5 + 1),
        (3, True, 999, None, 1.0, 1 + 2),  # packed, and what two others send
        (3, True, 999, None, 0.0, 1 + 1),  # packed, and the new value
        (3, True, 1, "bfloat16", 1.0, 2 * 0.5 + 0.5 + 1),
    ],
)
def test_copies_of_a_weight(replicas, sharded, threshold, dtype, share, copies):
    graph = READ["mlp"]
    found = reduced(
        graph, share, replicas=replicas, shard_optimizer=sharded,
        fusion_threshold=threshold, gradient_dtype=dtype,
    )  # fmt: skip
    assert found == [copies * weight.bytes for weight in graph.weights]


@pytest.mark.parametrize("name", ["tied_variable", "tied_head"])
def test_a_table_that_is_multiplied_has_a_dense_gradient(name):
    graph = READ[name]
    dense = reduced(graph, 1.0, replicas=2, fusion_threshold=1)
    assert dense == [weight.bytes for weight in graph.weights]


def test_frozen_weights_stay_where_they_are():
    graph = READ["frozen_start"]
    for sharded in (False, True):
        options = {"replicas": 2, "shard_optimizer": sharded}
        for size, weight in zip(reduced(graph, 0.5, **options), graph.weights, strict=True):
            assert (size > 0) == weight.trainable
