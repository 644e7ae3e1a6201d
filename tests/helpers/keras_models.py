"""Small Keras models of every kind that the partitioner must read; each with a batch of data."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops


def floats(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def integers(high, *shape):
    return np.random.default_rng(0).integers(0, high, size=shape).astype("int32")


def mlp():
    x = inputs = keras.Input((6,))
    for width in (8, 9, 8):
        x = layers.Dense(width, activation="relu")(x)
        x = layers.Dropout(0.3, seed=width)(x)
    return keras.Model(inputs, layers.Dense(3)(x)), floats(4, 6)


def sequential():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.GaussianNoise(0.1, seed=1),
            layers.Dense(2),
        ]
    )
    return model, floats(4, 6)


def residual_cnn():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.BatchNormalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(4, 3, padding="same")(y)
        x = layers.Add()([x, y])
    x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x))), floats(4, 8, 8, 3)


def two_in_two_out():
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    x = layers.Concatenate()([layers.Dense(6)(a), layers.Dense(6)(b)])
    first = layers.Dense(2, name="first")(x)
    second = layers.Dense(3, name="second")(layers.Multiply()([x, x]))
    return keras.Model([a, b], [first, second]), [floats(4, 4), floats(4, 5)]


def dicts():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((5,), name="b")}
    x = layers.Dense(6)(inputs["b"]) + layers.Dense(6)(inputs["a"])
    model = keras.Model(inputs, {"y": layers.Dense(2)(x), "x": x})
    return model, {"a": floats(4, 4), "b": floats(4, 5)}


def long_skip():
    x = inputs = keras.Input((6,))
    skip = layers.Dense(6)(x)
    x = layers.Dense(6, activation="elu")(skip)
    x = layers.Dense(6, activation="elu")(x)
    x = layers.Dense(6, activation="elu")(x)
    return keras.Model(inputs, layers.Add()([x, skip])), floats(4, 6)


def causal_attention():
    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.MultiHeadAttention(2, 4, dropout=0.2, seed=3)(x, x, use_causal_mask=True)
    x = layers.Add()([inputs, x])
    x = layers.Dense(8, activation="gelu")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(x)), floats(4, 5, 8)


def attention_kwargs():
    ids, memory = keras.Input((5,), dtype="int32"), keras.Input((7, 8))
    x = layers.Embedding(11, 8, mask_zero=True)(ids)
    memory_2 = layers.Dense(8)(memory)
    x = layers.MultiHeadAttention(2, 4)(query=x, value=memory_2, key=memory)
    x = layers.LSTM(4)(x)
    return keras.Model([ids, memory], layers.Dense(2)(x)), [integers(11, 4, 5), floats(4, 7, 8)]


def masked_recurrent():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 5, mask_zero=True)(ids)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(4))(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    return keras.Model(ids, layers.GlobalAveragePooling1D()(x)), integers(3, 4, 6)


def masking_concatenate():
    inputs = keras.Input((6, 3))
    a = layers.Masking()(inputs)
    b = layers.LSTM(3, return_sequences=True)(a)
    x = layers.Concatenate()([a, b])
    x = layers.Activation("tanh")(x)
    data = floats(4, 6, 3)
    data[:, 4:] = 0
    return keras.Model(inputs, layers.LSTM(4)(x)), data


def multi_output_lstm():
    inputs = keras.Input((5, 3))
    sequence, h, c = layers.LSTM(4, return_sequences=True, return_state=True)(inputs)
    x = layers.LSTM(4)(sequence, initial_state=[h, c])
    return keras.Model(inputs, [layers.Dense(2)(x), h]), floats(4, 5, 3)


def keras_ops():
    inputs = keras.Input((6, 4))
    x = layers.Dense(4)(inputs)
    y = ops.transpose(x[:, 1:5:2, :], (0, 2, 1))
    z = ops.matmul(x[:, 0:2], y) * 2.0 + 1
    w = ops.concatenate([z, ops.cast(inputs[..., :1] > 0, "float32")[:, :2]], axis=-1)
    parts = ops.split(w, [1], axis=-1)
    return keras.Model(inputs, ops.sum(parts[1], axis=-1) + ops.stop_gradient(x[:, :2, 0])), floats(
        4, 6, 4
    )


def shared_layer():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, activation="tanh", name="shared")
    x = shared(inputs)
    x = layers.Dense(6)(x)
    return keras.Model(inputs, layers.Dense(2)(shared(x))), floats(4, 6)


def nested_twice():
    i = keras.Input((6,))
    h = layers.Dense(6, name="inner_dense")(i)
    inner = keras.Model(
        i, layers.BatchNormalization()(layers.Dropout(0.5, seed=2)(h)), name="inner"
    )
    inputs = keras.Input((6,))
    x = inner(layers.Dense(6)(inputs))
    return keras.Model(inputs, layers.Dense(2)(inner(x + 1.0))), floats(4, 6)


def nested_sequential():
    block = keras.Sequential(
        [layers.Dense(5, activation="relu"), keras.Sequential([layers.Dense(4)], name="deep")],
        name="block",
    )
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(block(inputs))), floats(4, 6)


def nested_many():
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    c, d = layers.Dense(3)(a), layers.Dense(3)(b)
    listed = keras.Model([a, b], [c + d, c * d], name="listed")
    e, f = keras.Input((3,), name="e"), keras.Input((3,), name="f")
    dicted = keras.Model(
        {"e": e, "f": f}, {"q": layers.Dense(2)(e), "p": layers.Dense(2)(f)}, name="dicted"
    )
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    u, v = listed([left, right])
    out = dicted({"f": u, "e": v})
    return keras.Model([left, right], [out["p"], out["q"]]), [floats(4, 4), floats(4, 5)]


def nested_masked():
    i = keras.Input((6, 5))
    x = layers.LSTM(5, return_sequences=True)(i)
    reader = keras.Model(i, layers.LSTM(5, return_sequences=True)(x), name="reader")
    ids = keras.Input((6,), dtype="int32")
    embed = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(9, 5, mask_zero=True)]
    )
    x = embed(ids)
    x = reader(x)
    x = layers.Dropout(0.2, seed=4)(x)
    y = layers.Embedding(9, 5, mask_zero=True)(ids)
    x = layers.Add()([x, reader(y)])
    return keras.Model(ids, layers.GlobalAveragePooling1D()(x)), integers(3, 4, 6)


def nested_other_shape():
    i = keras.Input((None, None, 2))
    features = keras.Model(i, layers.Conv2D(3, 3, strides=2)(layers.ZeroPadding2D()(i)), name="f")
    inputs = keras.Input((8, 8, 2))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(features(inputs)))), floats(
        4, 8, 8, 2
    )


def opaque_rank():
    i = keras.Input((6,))
    inner = keras.Model(i, layers.Dense(3)(i), name="inner")
    inputs = keras.Input((6, 1))
    return keras.Model(inputs, layers.Dense(2)(inner(inputs))), floats(4, 6, 1)


def opaque_regularized():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="inner")
    inner.activity_regularizer = keras.regularizers.L2(0.1)
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(inner(inputs))), floats(4, 6)


def opaque_mask():
    i = keras.Input((6, 5))
    inner = keras.Model(i, layers.LSTM(5)(i), name="inner")
    inputs = keras.Input((6, 5))
    x = layers.Dense(5)(inputs)
    return keras.Model(inputs, inner(x, mask=inputs[..., 0] > 0)), floats(4, 6, 5)


class Doubled(keras.Model):
    """A Functional that changes what calling it does."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def opaque_subclass():
    i = keras.Input((6,))
    inner = Doubled(i, layers.Dense(3)(i), name="inner")
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(inner(layers.Dense(6)(inputs)))), floats(4, 6)


def lambdas():
    inputs = keras.Input((6,))
    x = layers.Dense(6)(inputs)
    x = layers.Lambda(lambda t: t * 2 + ops.mean(t, axis=-1, keepdims=True))(x)
    return keras.Model(inputs, layers.Dense(2)(x)), floats(4, 6)


def tied_variable():
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(11, 6)
    x = layers.Dense(6, activation="relu")(embedding(inputs))
    return keras.Model(inputs, ops.einsum("btf,vf->btv", x, embedding.embeddings)), integers(
        11, 4, 5
    )


def mixed_precision():
    policy = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu", dtype=policy)(inputs)
    x = layers.Dense(8, dtype=policy)(x)
    return keras.Model(inputs, layers.Dense(2, dtype="float32")(x)), floats(4, 6)


def frozen_start():
    inputs = keras.Input((6,))
    base = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.BatchNormalization()])
    base.trainable = False
    return keras.Model(inputs, layers.Dense(2)(base(inputs, training=False))), floats(4, 6)


ALL = [
    mlp,
    sequential,
    residual_cnn,
    two_in_two_out,
    dicts,
    long_skip,
    causal_attention,
    attention_kwargs,
    masked_recurrent,
    masking_concatenate,
    multi_output_lstm,
    keras_ops,
    shared_layer,
    nested_twice,
    nested_sequential,
    nested_many,
    nested_masked,
    nested_other_shape,
    opaque_rank,
    opaque_regularized,
    opaque_mask,
    opaque_subclass,
    lambdas,
    tied_variable,
    mixed_precision,
    frozen_start,
]
