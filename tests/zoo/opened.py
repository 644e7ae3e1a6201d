"""Models whose operations are inside of layers and of subclassed models, as people write them."""

import types

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.zoo.models import SameShape, chain


class Block(layers.Layer):
    """A transformer block: masks, a flag, and a weight of its own between the layers."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(2, width // 2, use_bias=False)
        self.mlp = keras.Sequential(
            [layers.Dense(2 * width, activation="gelu"), layers.Dense(width)]
        )
        self.dropout = layers.Dropout(0.0)

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", regularizer="l2")
        self.norms[0].build(shape)
        self.norms[1].build(shape)
        self.attention.build(shape, shape)
        self.mlp.build(shape)

    def call(self, x, training=None):
        batch, length = ops.shape(x)[0], ops.shape(x)[1]
        causal = ops.arange(length)[:, None] >= ops.arange(length)
        causal = ops.broadcast_to(causal[None], (batch, length, length))
        y = self.norms[0](x)
        x = x + self.scale * self.attention(y, y, attention_mask=causal, training=training)
        return x + self.dropout(self.mlp(self.norms[1](x)), training=training)


class Tokens(layers.Layer):
    def __init__(self, width, **options):
        super().__init__(**options)
        self.words = layers.Embedding(7, width, mask_zero=True)
        self.places = layers.Embedding(5, width)

    def call(self, ids):
        return self.words(ids) + self.places(ops.arange(ops.shape(ids)[-1]))

    def compute_mask(self, ids, mask=None):
        return self.words.compute_mask(ids)


class Encoder(keras.Model):
    """Subclassed, with blocks in a list, a loss of its own and the embedding's weights again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tokens = Tokens(4)
        self.blocks = [Block(4)]
        self.pool = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(7, activity_regularizer="l2")

    def call(self, ids, training=None):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, training=training)
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        logits = self.head(self.pool(x))
        return logits + ops.matmul(x[:, 0], ops.transpose(self.tokens.words.embeddings))


class Drops(layers.Layer):
    """Asks whether it trains."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense, self.drop = layers.Dense(6, activation="tanh"), layers.Dropout(0.5)

    def call(self, x, training=None):
        return self.drop(self.dense(x), training=training)


class Deaf(keras.Model):
    """Is not told whether it trains, so nothing in it trains: no dropout, as in plain Keras.

    What it returns has no names, and a layer that `call` makes anew is between its layers.
    """

    def __init__(self):
        super().__init__()
        self.hidden, self.head = Drops(), layers.Dense(3)

    def call(self, x):
        y = self.head(self.hidden(x))
        return [y, layers.Add()([y, y])]


class Halved(layers.Layer):
    """Calls a layer in training only, before, between and behind others."""

    def __init__(self):
        super().__init__()
        self.dense, self.half = [layers.Dense(6) for _ in range(3)], layers.Rescaling(0.5)

    def call(self, x, training=False):
        for dense in self.dense:
            x = dense(self.half(x) if training else x)
        return self.half(x) if training else x


class Judged(layers.Layer):
    """Adds a loss between its layers, and has two results."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(4)

    def call(self, x):
        y = self.first(x)
        self.add_loss(1e-1 * ops.mean(ops.square(x * y)))
        return self.second(y), y


class Told(layers.Layer):
    """Hands masks on by hand, repeats a layer on what it has made, and calls one on a weight."""

    def __init__(self, **options):
        super().__init__(**options)
        self.words = layers.Embedding(7, 4)
        self.judged, self.shift = [Judged(), Judged()], layers.Dense(4)
        self.pool = layers.GlobalAveragePooling1D()

    def build(self, shape):
        self.start = self.add_weight(shape=(1, 4), initializer="normal")
        self.words.build(shape)
        self.shift.build((None, 4))
        for judged in self.judged:
            judged.first.build((None, 4))
            judged.second.build((None, 4))
            judged.built = True

    def call(self, ids):
        real = ops.not_equal(ids, 0)
        x = self.pool(self.words(ids), mask=real)
        for judged in self.judged:
            x, skipped = judged(x)
            x = judged(x)[0] + skipped + self.shift(self.start)
        return x


class Keeps(layers.Layer):
    """Others may look at what it has made on the way, or only at an object around its result."""

    def __init__(self, how):
        super().__init__()
        self.how, self.dense = how, layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        self.seen = self.dense(x)
        return 2 * self.seen if self.how == "kept" else types.SimpleNamespace(value=self.seen)


def symbolic(model, *shape, dtype="float64"):
    model(keras.Input(shape, dtype=dtype))
    return model


def encoder():
    return symbolic(Encoder(), 5, dtype="int32")


def deaf():
    return symbolic(Deaf(), 6)


def told():
    return chain((5,), Told(), layers.Dense(3), dtype="int32")


def halved():
    return chain((6,), Halved())


def twice():
    """One composite layer, called twice, in a Functional model."""
    block, pool = Block(4, name="block"), layers.GlobalAveragePooling1D()
    return chain((5, 4), block, layers.Dense(4), block, pool, layers.Dense(3))


class Pair(SameShape):
    """Two layers, and something between them, which mostly keeps it whole."""

    def __init__(self, how):
        super().__init__(name="pair")
        self.how, self.second = how, layers.Dense(6)
        self.first = Keeps(how) if how in ("kept", "object") else layers.Dense(6)
        self.drop = layers.Dropout(0.5, seed=2)
        self.generator = keras.random.SeedGenerator(1)
        self.function = tf.function(lambda x: self.second(self.first(x)), autograph=False)
        self.table = tf.Variable(np.ones((6,)))
        self.build((None, 6))

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def call(self, x, training=False):
        if self.how == "random":
            x = x + keras.random.normal(ops.shape(x), seed=self.generator)
        if self.how == "function":
            return self.function(x)
        if self.how == "mapped":
            return tf.vectorized_map(lambda row: self.second(self.first(row[None]))[0], x)
        if self.how == "views":
            return sum(tf.split(self.second(self.first(tf.concat([x, -x], 0))), 2))
        if self.how == "variable":
            x = x * self.table
        if self.how == "flag" and training:
            return self.first(x)
        if self.how == "kept":
            return self.second(self.first(x)) + self.first.seen
        if self.how == "again":
            return self.second(self.drop(self.first(self.drop(x))))
        if self.how == "object":
            return self.second(self.first(x).value)
        if self.how == "rows":  # some samples, as experts do
            some = tf.where(x[:, 0] > 0)
            return tf.tensor_scatter_nd_add(x, some, self.second(self.first(tf.gather_nd(x, some))))
        if self.how == "anew":
            x = layers.Dense(6)(x)
        if self.how == "values" and float(ops.max(x)) > 0:
            return x
        return self.second(self.first(x))
