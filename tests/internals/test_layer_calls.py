"""The private parts of Keras and TensorFlow that `internals/layer_calls.py` reads, one by one."""

import keras
import pytest
import tensorflow as tf

from tarantella_pp.internals import layer_calls

pytestmark = pytest.mark.keras


def test_calls_go_to_the_handler_in_this_graph_only():
    layer, seen = keras.layers.Dense(2), []
    layer.build((None, 3))

    def handler(call, one, args, kwargs):
        seen.append(one)
        return call(one, *args, **kwargs)

    original = keras.layers.Layer.__call__
    with layer_calls.new_graph("test").as_default() as graph, layer_calls.layer_calls(handler):
        x = tf.compat.v1.placeholder("float32", (None, 3))
        assert graph.version == 1 == len(graph.get_operations())  # which counts operations
        assert layer(x).shape == (None, 2)
        tf.cond(tf.constant(True), lambda: layer(x), lambda: layer(x))  # graphs of their own
    assert seen == [layer]
    assert keras.layers.Layer.__call__ is original
    with keras.RematScope("full"):
        assert layer_calls.repeats_itself(keras.layers.Dense(2))
    assert not layer_calls.repeats_itself(layer)


def test_a_scope_between_layers_answers_for_variables():
    own, other = keras.Variable([1.0]), keras.Variable([2.0])
    writes, losses = [], []

    def read(variable):
        return None if variable is own else tf.constant([7.0])

    with layer_calls.GlueScope(read, writes.append, losses.append):
        assert (float(own.value[0]), float(other.value[0])) == (1.0, 7.0)
        own.assign([5.0])
        assert float(own.value[0]) == 1.0
        layer = keras.layers.ActivityRegularization(l1=1.0)
        layer(tf.ones((1, 2)))
    assert writes == [own]
    assert float(losses[0]) == 2.0
