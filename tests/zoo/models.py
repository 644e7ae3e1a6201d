"""Small Keras models of every kind, for tests to read, plan and train; `batch` gives them data."""

import keras
import numpy as np
from keras import layers, ops


def batch(model, rows=4):
    """Random inputs of a model: whole numbers from 0 to 2, or floats, zero where sequences end."""
    draw = np.random.default_rng(0)

    def values(tensor):
        shape = (rows, *tensor.shape[1:])
        if "int" in tensor.dtype:
            return draw.integers(0, 3, size=shape).astype(tensor.dtype)
        numbers = draw.normal(size=shape).astype(tensor.dtype)
        if len(shape) == 3:
            numbers[:, 4:] = 0
        return numbers

    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(values, inputs)


class SameShape(layers.Layer):
    """Gives what has the shape of its input."""

    def compute_output_shape(self, shape):
        return shape


def chain(shape, *steps, name=None, **options):
    """A model of layers, or of other functions of tensors, one after the other."""
    x = inputs = keras.Input(shape, **options)
    for step in steps:
        x = step(x)
    return keras.Model(inputs, x, name=name)


def mlp():
    hidden = [layers.Dense(width, activation="tanh") for width in (7, 8, 7)]
    return chain((6,), *hidden, layers.Dense(3))


def perceptron():
    return chain((6,), layers.Dense(5, activation="tanh"), layers.Dense(3))


def residual_cnn(normalization=lambda: layers.LayerNormalization(axis=[1, 2, 3]), blocks=2):
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = normalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(4, 3, padding="same", use_bias=False)(y)
        x = layers.Add()([x, y])
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def batch_norm_cnn(blocks=2):
    return residual_cnn(layers.BatchNormalization, blocks)


def two_in_two_out():
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    x = layers.Dense(6, activation="tanh")(a)
    early = layers.Dense(3, activation="softmax", name="early")(x)
    x = layers.Concatenate()([x, layers.Dense(6)(b)])
    x = layers.Dense(5, activation="elu")(x)
    return keras.Model([a, b], [layers.Dense(2, name="late")(x), early])


def long_skip():
    inputs = keras.Input((6,))
    x = skip = layers.Dense(6)(inputs)
    for _ in range(3):
        x = layers.Dense(6, activation="elu")(x)
    x = layers.Add()([x, skip, layers.Dense(6)(inputs)])
    return keras.Model(inputs, layers.Dense(3)(x))


def causal_attention():
    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(inputs)
    # Without biases: the gradient of that of the keys is zero, so Adam follows rounding errors.
    attention = layers.MultiHeadAttention(2, 4, use_bias=False)
    x = attention(x, x, use_causal_mask=True)
    h = layers.Add()([inputs, x])
    x = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(h))
    x = layers.Dense(8)(x) + h
    return keras.Model(inputs, layers.Dense(3)(x[:, -1]))


def embedding_with_mask():
    ids = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(ids)
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.MultiHeadAttention(2, 3, use_bias=False)(x, x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


class TokensAndPositions(layers.Layer):
    """Reads two tables at positions, in which no sample has a say, and one at words, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.words, self.places = layers.Embedding(6, 4), layers.Embedding(5, 4)

    def call(self, ids):
        places = ops.arange(ops.shape(ids)[-1])
        return self.words(ids) + self.places(places) * self.words(places)


def positions():
    first, last = layers.Dense(5, activation="tanh"), layers.Dense(3, activation="softmax")
    pool = layers.GlobalAveragePooling1D()
    return chain((5,), TokensAndPositions(), first, pool, last, dtype="int32")


class AddsLoss(layers.Layer):
    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def call(self, x):
        self.add_loss(self.formula(x))
        return x


def regularized():
    l2, dense = keras.regularizers.L2, layers.Dense
    shared = dense(6, "tanh", activity_regularizer=l2(0.1))
    both = dense(6, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1))
    more = layers.ActivityRegularization(l2=0.05), dense(6, "tanh", bias_regularizer=l2(0.1))
    return chain((6,), shared, shared, both, *more, dense(3, kernel_regularizer=l2(0.1)))


def nested():
    inner = chain((6,), layers.Dense(5), layers.Dense(6, activation="tanh"), name="inner")
    head = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)], name="head")
    inputs = keras.Input((6,))
    return keras.Model(inputs, head(inner(inner(layers.Dense(6)(inputs)) + 1.0)))


def tied_head():
    """A language model whose last layer has the weights of its first."""
    ids = keras.Input((5,), dtype="int32")
    table = layers.ReversibleEmbedding(6, 4, embeddings_regularizer=keras.regularizers.L2(0.1))
    x = table(ids)
    for _ in range(2):
        x = layers.Add()([x, layers.Dense(4, activation="tanh")(x)])
    return keras.Model(ids, table(layers.LayerNormalization()(x), reverse=True))


def counted():
    """A layer says that it gives floats, and gives integers of the same size over the cut."""
    lookup = layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="count")
    return chain((5,), lookup, layers.Dense(5, activation="tanh"), layers.Dense(3), dtype="int64")


class Half(layers.Layer):
    def call(self, x, training=False):
        return x[:, :2] if training else x


def half_in_training():
    """The cut is behind a layer whose output has another shape where the model does not train."""
    steps = layers.Dense(8, "tanh"), Half(), layers.Dense(7, "tanh"), layers.Dense(3)
    return chain((4, 6), *steps, layers.GlobalAveragePooling1D())


def looked_up_again():
    """The second look into the embedding depends on the first, and both gradients are sparse."""
    ids = keras.Input((5,), dtype="int32")
    table = layers.Embedding(6, 4)
    x = layers.Dense(4, activation="tanh")(table(ids))
    x = layers.Add()([layers.Dense(4)(x), table(ops.argmax(x, axis=-1))])
    x = layers.Dense(4, activation="tanh")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def tied_blocks():
    """The same layer in every other place, once before a branch whose gradient is stopped."""
    x = inputs = keras.Input((6,))
    block = layers.Dense(6, activation="tanh")
    frozen = layers.Dense(6, activation="tanh", trainable=False)
    for _ in range(3):
        x = layers.Dense(6, activation="elu")(frozen(block(x)))
    dead = ops.stop_gradient(block(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([x, dead])))


def adapted():
    """Frozen but for its head and LoRA's matrices; a layer that is called twice is in int8."""
    inputs = keras.Input((6,))
    first, small, free, lora, head = (
        layers.Dense(width, activation="tanh", trainable=width == 3) for width in (6, 7, 6, 7, 3)
    )
    x = free(small(first(inputs)))
    y = head(lora(x))
    small.quantize("int8")
    lora.enable_lora(2)
    lora.trainable = True
    return keras.Model(inputs, y + head(small(x)))


def unreached():
    inputs = keras.Input((6,))
    x = layers.Dense(6, activation="tanh")(inputs)
    dead = layers.Dense(6, activation="tanh")(layers.Dense(6)(x))
    x = layers.Dense(6, activation="tanh")(x) + ops.stop_gradient(dead)
    return keras.Model(inputs, [layers.Dense(3, name="used")(x), layers.Dense(2, name="unused")(x)])


def dropout():
    x = inputs = keras.Input((6,))
    for seed, width in enumerate((7, 8, 7)):
        x = layers.Dense(width, activation="tanh")(x)
        x = layers.Dropout(0.3, seed=seed)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GaussianNoise(0.1, seed=9)(x)))


class Table(layers.Layer):
    """Gives a table of positions and a scale, neither of which has rows of samples."""

    def build(self, shape):
        self.table = self.add_weight(shape=(1, *shape[1:]), initializer="normal", name="table")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return 1.0 * self.table, 2.0 * self.scale


@keras.saving.register_keras_serializable("tests")
class FromArray(layers.Layer):
    """Has a weight that cannot be made without its value."""

    def build(self, shape):
        self.held = keras.Variable(np.full(shape[-1], 0.5))

    def call(self, x):
        return x * self.held


def merged_windows():
    """Samples merged with windows, as in Swin, a table of positions, time before samples."""
    inputs = keras.Input((4, 6))
    x = layers.Dense(6, activation="tanh")(inputs)
    table, scale = Table()(x)
    windows = ops.reshape(x, (-1, 2, 6))
    windows = layers.Add()([windows, layers.Dense(6, activation="tanh")(windows)])
    windows = layers.MultiHeadAttention(2, 3, use_bias=False)(windows, windows)
    x = ops.reshape(layers.Dense(6)(windows), (-1, 4, 6)) * scale + table
    x = layers.Dense(6, activation="tanh")(ops.transpose(x, (1, 0, 2)))
    x = layers.Flatten()(ops.transpose(x, (1, 0, 2)))
    return keras.Model(inputs, layers.Dense(3)(x))


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), *(layers.Dense(n, activation="tanh") for n in (7, 8)), layers.Dense(3)]
    )


def dicts():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((5,), name="b")}
    x = layers.Dense(6)(inputs["b"]) + layers.Dense(6)(inputs["a"])
    return keras.Model(inputs, {"y": layers.Dense(2)(x), "x": x})


def one_skip():
    """A skip over three layers, and no more, for figures that are counted by hand."""
    inputs = keras.Input((6,))
    x = skip = layers.Dense(6)(inputs)
    for _ in range(3):
        x = layers.Dense(6, activation="elu")(x)
    return keras.Model(inputs, layers.Add()([x, skip]))


def attention_kwargs():
    ids, memory = keras.Input((5,), dtype="int32"), keras.Input((7, 8))
    x = layers.Embedding(11, 8, mask_zero=True)(ids)
    memory_2 = layers.Dense(8)(memory)
    x = layers.MultiHeadAttention(2, 4)(query=x, value=memory_2, key=memory)
    x = layers.LSTM(4)(x)
    return keras.Model([ids, memory], layers.Dense(2)(x))


def masked_recurrent():
    words, pool = layers.Embedding(9, 5, mask_zero=True), layers.GlobalAveragePooling1D()
    both = layers.Bidirectional(layers.SimpleRNN(4, return_sequences=True))
    each, last = layers.TimeDistributed(layers.Dense(4)), layers.LSTM(4, return_sequences=True)
    return chain((6,), words, both, each, last, pool, dtype="int32")


def multi_output_lstm():
    inputs = keras.Input((5, 3))
    sequence, h, c = layers.LSTM(4, return_sequences=True, return_state=True)(inputs)
    x = layers.LSTM(4)(sequence, initial_state=[h, c])
    return keras.Model(inputs, [layers.Dense(2)(x), h])


def keras_ops():
    inputs = keras.Input((6, 4))
    x = layers.Dense(4)(inputs)
    y = ops.transpose(x[:, 1:5:2, :], (0, 2, 1))
    z = ops.matmul(x[:, 0:2], y) * 2.0 + 1
    w = ops.concatenate([z, ops.cast(inputs[..., :1] > 0, "float32")[:, :2]], axis=-1)
    parts = ops.split(w, [1], axis=-1)
    return keras.Model(inputs, ops.sum(parts[1], axis=-1) + ops.stop_gradient(x[:, :2, 0]))


def shared_layer():
    shared = layers.Dense(6, activation="tanh", name="shared")
    return chain((6,), shared, layers.Dense(6), shared, layers.Dense(2))


def nested_twice():
    dense, drop = layers.Dense(6, name="inner_dense"), layers.Dropout(0.5, seed=2)
    inner = chain((6,), dense, drop, layers.BatchNormalization(), name="inner")
    inputs = keras.Input((6,))
    x = inner(layers.Dense(6)(inputs))
    return keras.Model(inputs, layers.Dense(2)(inner(x + 1.0)))


def nested_sequential():
    block = keras.Sequential(
        [layers.Dense(5, activation="relu"), keras.Sequential([layers.Dense(4)], name="deep")],
        name="block",
    )
    return chain((6,), block, layers.Dense(2))


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
    return keras.Model([left, right], [out["p"], out["q"]])


def nested_masked():
    twice = [layers.SimpleRNN(5, return_sequences=True) for _ in range(2)]
    reader = chain((6, 5), *twice, name="reader")
    ids = keras.Input((6,), dtype="int32")
    embed = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(9, 5, mask_zero=True)]
    )
    x = embed(ids)
    x = reader(x)
    x = layers.Dropout(0.2, seed=4)(x)
    y = layers.Embedding(9, 5, mask_zero=True)(ids)
    x = layers.Add()([x, reader(y)])
    return keras.Model(ids, layers.GlobalAveragePooling1D()(x))


def nested_other_shape():
    steps = layers.ZeroPadding2D(), layers.Conv2D(3, 3, strides=2)
    features = chain((None, None, 2), *steps, name="f")
    return chain((8, 8, 2), features, layers.Flatten(), layers.Dense(2))


def opaque_rank():
    inner = chain((6,), layers.Dense(3), name="inner")
    return chain((6, 1), inner, layers.Dense(2))


def opaque_regularized():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="inner")
    inner.activity_regularizer = keras.regularizers.L2(0.1)
    return chain((6,), inner, layers.Dense(2))


def opaque_mask():
    inner = chain((6, 5), layers.SimpleRNN(5), name="inner")
    inputs = keras.Input((6, 5))
    x = layers.Dense(5)(inputs)
    return keras.Model(inputs, inner(x, mask=inputs[..., 0] > 0))


class Doubled(keras.Model):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def opaque_subclass():
    i = keras.Input((6,))
    inner = Doubled(i, layers.Dense(3)(i), name="inner")
    return chain((6,), layers.Dense(6), inner, layers.Dense(2))


def tied_variable():
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(11, 6)
    x = layers.Dense(6, activation="relu")(embedding(inputs))
    return keras.Model(inputs, ops.einsum("btf,vf->btv", x, embedding.embeddings))


def frozen_start():
    inputs = keras.Input((6,))
    base = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.BatchNormalization()])
    base.trainable = False
    return keras.Model(inputs, layers.Dense(2)(base(inputs, training=False)))


READ = [
    mlp, dropout, sequential, batch_norm_cnn, two_in_two_out, dicts, causal_attention,
    attention_kwargs, masked_recurrent, multi_output_lstm, keras_ops, shared_layer, nested_twice,
    nested_sequential, nested_many, nested_masked, nested_other_shape, opaque_rank,
    opaque_regularized, opaque_mask, opaque_subclass, tied_variable, frozen_start,
]  # fmt: skip
"""Those that the partitioner is tried with, one of each kind; `training.CASES` has the others."""
