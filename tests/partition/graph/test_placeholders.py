"""What the first dimension of each tensor counts."""

import keras
import pytest
from keras import layers, ops

from tarantella_pp.partition.graph.keras_reader import extract
from tests.zoo.models import chain, merged_windows

pytestmark = pytest.mark.keras


def test_samples_windows_tables_and_scalars():
    """Shape, rows of a sample, and the dimension that samples are along."""
    tensors = extract(merged_windows()).graph.tensors
    assert {(t.shape, t.rows_per_sample, t.sample_axis) for t in tensors} == {
        ((None, 4, 6), 1, 0), ((None, 2, 6), 2, 0), ((1, 4, 6), 0, None), ((), 0, None),
        ((4, None, 6), 0, 1), ((None, 24), 1, 0), ((None, 3), 1, 0),
    }  # fmt: skip


def test_samples_and_steps_of_any_number():
    inputs = keras.Input((None, 6))
    merged = ops.reshape(inputs, (-1, 6))
    graph = extract(keras.Model(inputs, [ops.transpose(inputs, (1, 0, 2)), merged])).graph
    assert [graph.tensors[i].sample_axis for i in graph.outputs] == [1, 0]
    assert [graph.tensors[i].rows_per_sample for i in graph.outputs] == [0, None]


def test_learned_queries_get_a_row_for_each_sample_from_what_they_ask():
    """Keras says of attention that its result has the shape of the queries."""
    inputs = keras.Input((7, 4))
    queries = layers.Dense(4)(ops.ones_like(inputs)[:1, :3])
    made = layers.Dense(2)(layers.Attention()([queries, inputs]))
    graph = extract(keras.Model(inputs, made)).graph
    (output,) = (graph.tensors[i] for i in graph.outputs)
    assert (output.shape, output.rows_per_sample) == ((None, 3, 2), 1)


class Places(layers.Layer):
    """Numbers the steps of a sample, however many there are."""

    def call(self, x):
        return ops.arange(ops.shape(x)[1])


def test_steps_of_any_number_are_no_samples():
    inputs = keras.Input((None, 6))
    x = layers.Embedding(9, 6)(Places()(inputs)) + inputs
    tensors = extract(keras.Model(inputs, x)).graph.tensors
    assert [tensor.sample_axis for tensor in tensors] == [0, None, None, 0]


class HalfAndOne(layers.Layer):
    def call(self, x):
        return ops.reshape(x, (x.shape[0] // 2 + 1, -1)) if x.shape[0] else x


class Picky(layers.Layer):
    def call(self, x):
        if x.shape[0] is not None:
            raise ValueError("any number but that")
        return x


@pytest.mark.parametrize("layer", [HalfAndOne(), Picky()])
def test_what_cannot_be_told(layer):
    graph = extract(chain((6,), layer)).graph
    assert graph.tensors[-1].rows_per_sample is None
