import copy
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.functional import get_mask, operation_fn, set_mask, tree
from tarantella_pp.partition.graph.keras_reader import extract
from tests.zoo import models

pytestmark = pytest.mark.keras


SLOW = (models.masked_recurrent, models.nested_masked)


def state(model):
    return [v.numpy() for v in model.variables]


def restore(model, values):
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)


def footprint(model):
    """What reading a model could leave behind on it."""
    nodes, operations = [], [model]
    while operations:
        operation = operations.pop()
        nodes.append((id(operation), len(operation._inbound_nodes), len(operation._outbound_nodes)))
        operations += getattr(operation, "operations", getattr(operation, "_layers", []))
    return nodes, [id(v) for v in model.variables], copy.deepcopy(model.get_config())


CLOSED = {
    models.opaque_rank: "Functional",
    models.opaque_regularized: "Sequential",
    models.opaque_mask: "Functional",
    models.opaque_subclass: "Doubled",
}
"""Nested models that do more than their graph says; all others are opened."""


@pytest.mark.parametrize(
    "build",
    [pytest.param(b, marks=pytest.mark.slow) if b in SLOW else b for b in models.READ],
    ids=lambda build: build.__name__,
)
def test_reading_touches_nothing_and_stages_give_bitwise_what_the_model_gives(build):
    keras.utils.set_random_seed(1)
    model = build()
    untouched = footprint(model)
    extracted = extract(model)
    graph = extracted.graph
    assert footprint(model) == untouched
    assert {id(v) for v in extracted.variables} == {id(v) for v in model.variables}
    assert extract(build()).graph.fingerprint() == graph.fingerprint()
    closed = {"Functional", "Sequential", "Doubled"} & {node.kind for node in graph.nodes}
    assert closed == ({CLOSED[build]} if build in CLOSED else set())
    assert len(graph.nodes) == len(extracted.calls)
    data = models.batch(model)
    before = state(model)
    few, many = random_stages(graph, 3, seed=1), [*range(len(graph.nodes))]
    for training, stages in ((False, few), (True, many)):
        restore(model, before)
        expected = tree.flatten(model(data, training=training))
        after = state(model)
        restore(model, before)
        result, values, masks = run(extracted, data, stages, training)
        for a, b in zip(tree.flatten(result), expected, strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b), strict=True)
        for a, b in zip(state(model), after, strict=True):
            np.testing.assert_array_equal(a, b)
        for t, value in values.items():
            assert_described(graph.tensors[t], value, masks[t])


def assert_described(tensor, value, mask):
    assert value.dtype.name == tensor.dtype
    assert len(value.shape) == len(tensor.shape)
    assert all(d is None or d == n for d, n in zip(tensor.shape, value.shape, strict=True))
    assert (mask is None) == (tensor.mask_shape is None), tensor.name
    if mask is not None:
        assert all(d is None or d == n for d, n in zip(tensor.mask_shape, mask.shape, strict=True))


def names(model):
    return [node.name for node in extract(model).graph.nodes]


def test_names_show_paths_and_second_calls():
    shared = [n for n in names(models.shared_layer()) if n.startswith("shared")]
    assert shared == ["shared", "shared:1"]
    inner = [n for n in names(models.nested_twice()) if "inner_dense" in n]
    assert inner == ["inner/inner_dense", "inner/inner_dense:1"]
    assert any(n.startswith("block/deep/") for n in names(models.nested_sequential()))


def test_ties_are_the_calls_that_share_weights():
    def tied(model):
        graph = extract(model).graph
        return [{graph.nodes[i].name.split("_")[0] for i in nodes} for nodes in graph.ties]

    assert tied(models.mlp()) == []
    assert tied(models.shared_layer()) == [{"shared", "shared:1"}]
    assert tied(models.tied_variable()) == [{"embedding", "einsum"}]
    frozen = models.shared_layer()
    frozen.trainable = False
    assert tied(frozen) == [{"shared", "shared:1"}]


def test_groups_are_the_calls_that_share_statistics_or_seeds():
    graph = extract(models.shared_layer()).graph
    assert graph.groups == ()
    graph = extract(models.nested_twice()).graph
    kinds = [{graph.nodes[i].kind for i in group} for group in graph.groups]
    assert kinds == [{"Dropout"}, {"BatchNormalization"}]
    assert [len(nodes) for nodes in graph.ties] == [2]  # those of the dense layer
    inputs, table = keras.Input((5,), dtype="int32"), layers.ReversibleEmbedding(7, 4)
    whole = keras.Model(inputs, table(table(inputs), reverse=True))
    table.quantize("int8")
    assert extract(whole).graph.groups == ()  # numbers in int8 are constants


def test_shapes_inside_a_nested_model_are_those_of_the_call():
    graph = extract(models.nested_other_shape()).graph
    shapes = {node.kind: graph.tensors[node.outputs[0]].shape for node in graph.nodes}
    assert shapes["ZeroPadding2D"] == (None, 10, 10, 2)
    assert shapes["Conv2D"] == (None, 4, 4, 3)
    assert graph.assumed_size is None


def test_unknown_sizes_are_assumed_and_said():
    graph = extract(models.chain((None, 3), layers.Dense(2))).graph
    assert graph.assumed_size == 256
    assert graph.tensors[graph.outputs[0]].bytes_per_sample == 256 * 2 * 4


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


def passes_an_input_on():
    inputs = keras.Input((3,))
    return keras.Model(inputs, [inputs, layers.Dense(2)(inputs)])


def step_by_step():
    counts = layers.Lambda(lambda x: len(range(ops.shape(x)[0])) * x, (3,))
    return models.chain((3,), layers.Dense(3, activation=layers.PReLU()), counts)


def deep():
    class Aux(layers.Layer):
        def call(self, x, training=False):
            return (x, 2 * x) if training else x

    return models.chain((3,), Aux(name="aux"))


def optional():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b", optional=True)

    class Or(layers.Layer):
        def call(self, x, y):
            return x if y is None else x + y

    return keras.Model([a, b], Or()(a, b))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Subclassed, r"subclassed model \(class Subclassed.*Call it once: model\(keras.Input"),
        (
            lambda: models.Doubled(x := keras.Input((6,)), layers.Dense(3)(x)),
            "class Doubled defines call",
        ),
        (lambda: keras.Sequential([layers.Dense(2)]), "not built.*keras.Input"),
        (lambda: layers.Dense(2), "Expected a Keras model"),
        (lambda: None, "Expected a Keras model.*NoneType"),
        (passes_an_input_on, "its inputs as they are"),
        (lambda: models.chain((4,), layers.Dense(2), sparse=True), "sparse.*Make it dense"),
        (lambda: models.chain((), layers.StringLookup(), dtype="string"), "string.*data pipeline"),
        (optional, "'b' is optional"),
        (deep, r"'aux' .Aux. returns another number .*training \(2\).*\(1, on.*Return all in both"),
        (step_by_step, "as an integer.*Call it on some samples first"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_remedy(build, message):
    with pytest.raises(UnsupportedModelError, match=message):
        extract(build())


def attention_then_add():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(ids)
    y = layers.MultiHeadAttention(2, 2)(x, x)
    z = layers.LSTM(4, return_sequences=True)(layers.Add()([x, y]))
    return keras.Model(ids, [layers.GlobalAveragePooling1D()(z), layers.LSTM(3)(x)])


class Block(layers.Layer):
    """A custom layer that deletes a mask and makes another."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 2)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x) + x


def custom_block():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(ids)
    y = Block()(x)
    return keras.Model(ids, [layers.LSTM(3)(layers.Add()([x, y])), layers.LSTM(3)(x)])


def cast_to_the_same_dtype():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 5, mask_zero=True)(ids)
    return keras.Model(ids, [layers.LSTM(3)(ops.cast(x, "float32"))])


@pytest.mark.parametrize("build", [attention_then_add, custom_block, cast_to_the_same_dtype])
def test_a_mask_is_there_or_deleted_for_later_calls_on_any_stage(build):
    model = build()
    data = models.batch(model)
    extracted = extract(model)
    deleted = any(call.unmasked for call in extracted.calls)
    assert deleted == (build is not cast_to_the_same_dtype)
    stages = list(range(len(extracted.graph.nodes)))
    result, _, _ = run(extracted, data, stages, training=False)
    for a, b in zip(tree.flatten(result), tree.flatten(model(data)), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


def random_stages(graph, num_stages, seed):
    """A random order-respecting assignment: no edge runs from a later to an earlier stage."""
    rng = random.Random(seed)
    stages = [0] * len(graph.nodes)
    weights = [rng.random() for _ in graph.nodes]
    for node in graph.nodes:
        least = max((stages[a] for a, b in graph.edges if b == node.id), default=0)
        step = 0 if weights[node.id] < 0.6 else rng.randrange(num_stages)
        stages[node.id] = min(num_stages - 1, least + step)
    return stages


def run(extracted, data, stages, training):
    """Runs all stages; returns the outputs in the model's structure, all values and masks."""
    graph = extracted.graph
    dtypes = [graph.tensors[t].dtype for t in graph.inputs]
    flat = [tf.convert_to_tensor(x, d) for x, d in zip(tree.flatten(data), dtypes, strict=True)]
    everything = dict(zip(graph.inputs, flat, strict=True))
    masks = dict.fromkeys(graph.inputs)
    for stage in sorted(set(stages)):
        nodes = [node for node in graph.nodes if stages[node.id] == stage]
        made = {t for node in nodes for t in node.outputs}
        given = {t: everything[t] for node in nodes for t in node.inputs if t not in made}
        # Copies, as messages between ranks make them, which have no masks
        values = {t: tf.constant(np.array(value)) for t, value in given.items()}
        for node in nodes:
            call = extracted.calls[node.id]
            for t in call.inputs:
                set_mask(values[t], None if t in call.unmasked else masks[t])
            args, kwargs = call.arguments.fill_in({k: values[t] for k, t in call.bindings.items()})
            result = operation_fn(call.operation, training=training)(*args, **kwargs)
            values.update(zip(call.outputs, tree.flatten(result), strict=True))
            masks.update((t, get_mask(values[t])) for t in call.outputs)
        everything.update((t, values[t]) for t in made)
    outputs = [everything[t] for t in graph.outputs]
    return tree.pack_sequence_as(extracted.outputs_struct, outputs), everything, masks
