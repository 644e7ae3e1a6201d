"""Arithmetic of calls, as it is traced: products count exactly, all else by its numbers."""

import keras
import pytest
from keras import layers, ops

from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.graph.keras_reader import extract

pytestmark = pytest.mark.keras


def flops_of(layer, *shapes, dtype="float32", listed=False, **call):
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    outputs = layer(inputs, **call) if listed else layer(*inputs, **call)
    node = extract(keras.Model(inputs, outputs)).graph.nodes[-1]
    return node.flops, node.flops_source


@pytest.mark.parametrize(
    ("layer", "shapes", "expected"),
    [
        (layers.Dense(8, use_bias=False), [(16,)], 2 * 16 * 8),
        (layers.Dense(8, activation="relu"), [(5, 16)], 5 * (2 * 16 * 8 + 8 + 8)),
        (layers.EinsumDense("abc,cde->abde", (5, 2, 3)), [(5, 16)], 2 * 5 * 16 * 6),
        (layers.Conv2D(4, 3, use_bias=False), [(8, 8, 3)], 2 * 36 * 4 * 27),
        (layers.Conv2D(4, 3, groups=2, use_bias=False), [(8, 8, 6)], 2 * 36 * 4 * 27),
        (layers.Conv1D(4, 3, strides=2, use_bias=False), [(9, 5)], 2 * 4 * 4 * 15),
        (layers.Conv3D(4, 2, use_bias=False), [(3, 3, 3, 2)], 2 * 8 * 4 * 16),
        (layers.DepthwiseConv2D(3, use_bias=False), [(8, 8, 3)], 2 * 36 * 3 * 9),
        (layers.SeparableConv2D(5, 3, use_bias=False), [(8, 8, 3)], 2 * 36 * 3 * (9 + 5)),
        (layers.Conv2DTranspose(4, 3, use_bias=False), [(8, 8, 3)], 2 * 64 * 3 * 4 * 9),
        (layers.MaxPooling2D(2), [(8, 8, 3)], 16 * 3 * 4),
        (layers.GlobalAveragePooling2D(), [(8, 8, 3)], 192),
        (layers.Activation("relu"), [(8,)], 8),
        (layers.Flatten(), [(8, 3)], 0),
    ],
)
def test_layers(layer, shapes, expected):
    assert flops_of(layer, *shapes) == (expected, "analytic")


def test_an_embedding_read_backwards_is_a_product():
    products = 2 * 5 * 11 * 4
    assert flops_of(layers.ReversibleEmbedding(11, 4), (5, 4), reverse=True)[0] == products
    capped = layers.ReversibleEmbedding(11, 4, logit_soft_cap=30.0)
    assert flops_of(capped, (5, 4), reverse=True)[0] > products + 5 * 11


def test_loops_take_the_products_of_each_position():
    found, source = flops_of(layers.LSTM(16), (60, 5))
    products = 60 * 2 * 4 * 16 * (16 + 5)
    assert products < found < 1.5 * products
    assert source == "estimated"  # what it keeps is
    shorter, _ = flops_of(layers.LSTM(16), (30, 5))
    assert shorter == pytest.approx(found / 2, rel=0.03)


def test_attention_counts_projections_and_scores():
    heads, size, dim, queries, keys = 2, 64, 8, 50, 70
    found, source = flops_of(layers.MultiHeadAttention(heads, size), (queries, dim), (keys, dim))
    products = 2 * dim * heads * size * (2 * queries + 2 * keys)
    products += heads * queries * keys * 4 * size
    assert products < found < 1.1 * products
    assert source == "analytic"


def test_operations():
    assert flops_of(ops.add, (5, 4), (5, 4)) == (20, "analytic")
    transposed = flops_of(lambda a, b: ops.matmul(a, b), (5, 4), (4, 3))
    assert transposed == (2 * 5 * 4 * 3, "analytic")
    einsum = flops_of(lambda a, b: ops.einsum("btf,bsf->bts", a, b), (5, 4), (3, 4))
    assert einsum == (2 * 5 * 3 * 4, "analytic")
    assert flops_of(lambda a: a[:, 1:3], (5, 4)) == (0, "analytic")
    assert flops_of(lambda a: ops.sum(a, -1), (5, 4)) == (20, "analytic")


class Mixer(layers.Layer):
    def build(self, shape):
        self.a = self.add_weight(shape=(shape[-1], 16))
        self.b = self.add_weight(shape=(16, shape[-1]))

    def call(self, x):
        return ops.matmul(ops.matmul(x, self.a), self.b)


class Picky(layers.Dense):
    """A layer that nobody can look into."""

    def call(self, x):
        if x.shape[0] is not None:
            raise ValueError("any number but that")
        return super().call(x)


def test_layers_without_a_rule_cost_what_is_inside_or_a_guess_that_says_so():
    assert flops_of(Mixer(), (5, 8)) == (2 * 5 * 2 * 8 * 16, "analytic")
    assert flops_of(layers.Lambda(lambda x: x), (8,)) == (0.0, "analytic")
    assert flops_of(Picky(4), (8,)) == (2 * 8 * 4 + 4, "estimated")


def test_a_known_network():
    with only_shapes():
        model = keras.applications.ResNet50(weights=None)
    flops = sum(node.flops for node in extract(model).graph.nodes)
    assert flops == pytest.approx(7.75e9, rel=0.03)  # 3.87 G multiply-adds are published
