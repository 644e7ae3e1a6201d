"""The private parts of Keras that `internals/functional.py` reads, one by one.

When one of these fails after an upgrade of Keras, that file is the place to mend.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tarantella_pp.internals import functional
from tests.zoo.models import chain

pytestmark = pytest.mark.keras


@pytest.fixture(scope="module")
def model():
    words = layers.Embedding(7, 4, mask_zero=True)
    return chain((5,), words, layers.Dropout(0.5), layers.LSTM(4), layers.Dense(2), dtype="int32")


def test_models_and_layers_have_the_names_that_are_read(model):
    assert functional.inputs_struct(model) is model.inputs[0]
    assert functional.outputs_struct(model) is model.outputs[0]
    assert functional.input_layer_of(model.inputs[0]) is model.layers[0], "_keras_history"
    assert functional.runs_its_graph(model)
    assert functional.is_plain_call(model), "_remat_mode, quantization_mode, _call_context_args"
    assert functional.is_default(layers.Dense(2).compute_mask), "utils.default"
    assert not functional.is_default(layers.Masking().compute_mask)
    assert functional.is_own_layer(layers.Dense(2)), "module names"
    assert functional.class_of_keras(layers.Dense(2)) == "Dense"


def test_a_subclassed_model_has_its_call_on_inputs_as_a_graph(model):
    class Subclass(keras.Model):
        def call(self, x):
            return {"out": x + 1}

    one = Subclass()
    assert functional.network_around(one) is None
    outputs = one(keras.Input((3,)))
    around = functional.network_around(one)
    assert [node.operation for node in functional.ordered_nodes(around)][-1] is one
    assert functional.outputs_struct(around) == outputs
    assert functional.takes_training(model)
    assert not functional.takes_training(one)
    functional.treat_like(around, one)
    assert not functional.takes_training(around)


def test_calls_come_in_an_order_in_which_they_can_run(model):
    seen = set()
    for node in functional.ordered_nodes(model):
        assert all(id(t) in seen for t in node.input_tensors), "order of _nodes_by_depth"
        seen.update(id(t) for t in node.outputs)
        values = {id(t): i for i, t in enumerate(node.input_tensors)}
        if not node.is_input:
            found = keras.tree.flatten(node.arguments.fill_in(values))
            assert set(values.values()) <= {v for v in found if type(v) is int}, "fill_in"
    assert {id(t) for t in model.outputs} <= seen


def test_layers_know_what_they_train_even_when_frozen():
    norm = layers.BatchNormalization()
    norm.build((None, 3))
    for norm.trainable in (True, False):
        assert functional.trained_variables(norm) == [norm.gamma, norm.beta]


def test_a_sequential_holds_a_functional():
    built = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    assert isinstance(functional.network_of(built), functional.Functional)
    assert functional.network_of(keras.Sequential([layers.Dense(2)])) is None


def test_calls_bake_training_and_masks(model):
    by_kind = {type(n.operation).__name__: n for n in functional.ordered_nodes(model)}
    assert "NotEqual" in by_kind, "Embedding's mask is a call of its own"
    assert "mask" in by_kind["LSTM"].arguments.kwargs, "masks in Node.arguments"
    x = np.ones((4, 8), "float32")
    out = functional.operation_fn(layers.Dropout(0.5, seed=0), training=True)(x, training=False)
    assert not np.array_equal(np.array(out), x), "operation_fn overrides the baked training"


def test_models_know_metrics_that_are_attributes():
    model = keras.Sequential([layers.Dense(2)])
    model.compile(metrics=["mae"])
    assert functional.own_metrics(model) == []
    model.meter = keras.metrics.Mean(name="speed")
    assert functional.own_metrics(model) == [model.meter]


def test_attention_deletes_the_masks_of_its_inputs_in_place():
    x = keras.ops.ones((2, 3, 4))
    functional.set_mask(x, keras.ops.ones((2, 3), "bool"))
    layers.MultiHeadAttention(2, 2)(x, x)
    assert functional.get_mask(x) is None


def test_calls_go_to_the_handler_in_this_graph_only():
    layer, seen = keras.layers.Dense(2), []
    layer.build((None, 3))

    def handler(call, one, args, kwargs):
        seen.append(one)
        return call(one, *args, **kwargs)

    original = keras.layers.Layer.__call__
    with functional.new_graph("test").as_default() as graph, functional.layer_calls(handler):
        x = tf.compat.v1.placeholder("float32", (None, 3))
        assert graph.version == 1 == len(graph.get_operations())  # which counts operations
        assert layer(x).shape == (None, 2)
        tf.cond(tf.constant(True), lambda: layer(x), lambda: layer(x))  # graphs of their own
    assert seen == [layer]
    assert keras.layers.Layer.__call__ is original
    with keras.RematScope("full"):
        assert functional.repeats_itself(keras.layers.Dense(2))
    assert not functional.repeats_itself(layer)


def test_a_scope_between_layers_answers_for_variables():
    own, other = keras.Variable([1.0]), keras.Variable([2.0])
    writes, losses = [], []

    def read(variable):
        return None if variable is own else tf.constant([7.0])

    with functional.GlueScope(read, writes.append, losses.append):
        assert (float(own.value[0]), float(other.value[0])) == (1.0, 7.0)
        own.assign([5.0])
        assert float(own.value[0]) == 1.0
        layer = keras.layers.ActivityRegularization(l1=1.0)
        layer(tf.ones((1, 2)))
    assert writes == [own]
    assert float(losses[0]) == 2.0
