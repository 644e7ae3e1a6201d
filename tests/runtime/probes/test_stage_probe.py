"""What mixes samples, writes its state or draws random numbers of no one is refused by name."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.probes import parts
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace
from tests.helpers.training import (
    distance,
    sgd,
    use_float64,
)

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(2, 6, 5))
IDS = RNG.integers(0, 7, size=(6, 5))


class Own(layers.Layer):
    """A layer with a weight to scale its input with, as tests want it."""

    def __init__(self, function, gain="ones", **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.gain = self.add_weight(shape=(), initializer=gain, name="gain")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x, training=None):
        return self.function(self, x, training)

    def compute_output_shape(self, shape):
        return shape


def between(*inner):
    """A model of two stages, with layers of the test in the first one."""
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, activation="tanh", name="before")(x)
    for layer in inner:
        x = layer(x)
    x = layers.Dense(5, activation="tanh", name="after")(x)
    return keras.Model(inputs, layers.Dense(5, name="last")(x))


def compiled(model):
    model.compile(sgd(), "mse", run_eagerly=not isinstance(model, PipelineModel))
    return model


def piped(model, micro_batches=3, stages=2, **options):
    return compiled(PipelineModel(model, stages, num_micro_batches=micro_batches, **options))


def centred(layer, x, _):
    return x - layer.gain * ops.mean(x, axis=0, keepdims=True)


def only_in_training(layer, x, training):
    return centred(layer, x, training) if training else x


def reversed_samples(layer, x, _):
    return layer.gain * x + ops.flip(x, axis=0)


def rarely_halved(layer, x, _):
    return layer.gain * ops.where(ops.any(ops.abs(x) > 50), 0.5 * x, x)


def rarely_scaled(layer, x, _):
    return layer.gain * x / ops.maximum(ops.max(ops.abs(x), axis=0), 100.0)


def rarely_shifted(layer, x, _):
    return layer.gain * x + ops.sum(ops.relu(x - 50.0))


def clipped_on_the_way_back(layer, x, _):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 1e6)

    return clipped(layer.gain * x)


def crowded(layer, x, _):
    """Two experts, each with room for half of the samples and one; more are left out."""
    to_first = ops.cast(x[:, :1] + 0.0 * layer.gain > 0, x.dtype)
    chosen = ops.concatenate([to_first, 1 - to_first], axis=1)
    room = ops.cast(ops.shape(x)[0] // 2 + 1, x.dtype)
    kept = ops.sum(chosen * ops.cast(ops.cumsum(chosen, axis=0) <= room, x.dtype), axis=1)
    return layer.gain * x * kept[:, None]


MIXING = {
    "crowded": lambda: Own(crowded, name="odd"),
    "rarely halved": lambda: Own(rarely_halved, name="odd"),
    "rarely scaled": lambda: Own(rarely_scaled, name="odd"),
    "rarely shifted": lambda: Own(rarely_shifted, name="odd"),
    "centred": lambda: Own(centred, name="odd"),
    "zero gain": lambda: Own(centred, gain="zeros", name="odd"),
    "training": lambda: Own(only_in_training, name="odd"),
    "reversed": lambda: Own(reversed_samples, name="odd"),
    "lambda": lambda: layers.Lambda(lambda x: x - ops.mean(x, axis=0), name="odd"),
    "mix up": lambda: keras.Sequential(
        [layers.Reshape((5, 1, 1)), layers.MixUp(seed=3), layers.Flatten()], name="odd"
    ),
}


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 6) for name in MIXING), ("zero gain", 3), ("mix up", 3)]
)
def test_layers_that_mix_samples_are_refused_by_name(name, rows):
    """With 6 rows in 3 micro-batches there are two in each, with 3 rows one."""
    model = piped(between(MIXING[name]()))
    before = [w.numpy() for w in model.weights]
    with pytest.raises(UnsupportedModelError, match=r"odd.*num_micro_batches=1") as caught:
        model.train_on_batch(X[:rows], Y[:rows])
    assert "mixes samples" in str(caught.value)
    assert distance(before, [w.numpy() for w in model.weights]) == 0
    assert int(model.optimizer.iterations) == 0


def test_gradients_that_are_rarely_clipped_together_are_refused():
    with pytest.raises(UnsupportedModelError, match="mixes samples"):
        piped(between(Own(clipped_on_the_way_back))).train_on_batch(X, Y)


def numbered(layer, x, _):
    return layer.gain * x * ops.cast(1 + ops.arange(ops.shape(x)[0])[:, None], x.dtype)


def counted(layer, x, _):
    return layer.gain * x / ops.cast(ops.shape(x)[0], x.dtype)


@pytest.mark.parametrize("function", [numbered, counted])
@pytest.mark.parametrize("call", ["train_on_batch", "predict_on_batch"])
def test_layers_that_count_samples_are_refused_by_name(function, call):
    model = piped(between(Own(function, name="odd")))
    data = (X, Y) if call == "train_on_batch" else (X,)
    with pytest.raises(UnsupportedModelError, match=r"odd.*number of samples.*num_micro_batches=1"):
        getattr(model, call)(*data)


def turned(*inner):
    """Time before samples, each operation a stage: samples are not first where cuts cross."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 5))
    x = ops.transpose(layers.Dense(5, activation="tanh")(inputs), (1, 0, 2))
    for make in inner:
        x = make()(x)
    x = layers.Flatten()(ops.transpose(x, (1, 0, 2)))
    model = keras.Model(inputs, layers.Dense(5)(x))
    return model, 5 + len(inner)


TURNED = RNG.normal(size=(6, 4, 5))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda o, x, _: x + (o.gain - 1) * ops.mean(x, 1, keepdims=True), "mixes"),
        (lambda o, x, _: o.gain * x / ops.cast(ops.shape(x)[1], x.dtype), "number"),
    ],
)
def test_samples_along_another_dimension_are_looked_at_too(function, what):
    model, stages = turned(lambda: Own(function, name="odd"))
    with pytest.raises(UnsupportedModelError, match=f"odd.*{what}"):
        piped(model, stages=stages).train_on_batch(TURNED, Y)


class Watched(layers.Layer):
    """Adds a sum and a mean over samples to the loss, and to metrics; time comes first."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean("seen")
        self.total = keras.metrics.Sum("total")

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        self.add_loss(ops.mean(ops.abs(x)))
        self.seen.update_state(ops.mean(ops.abs(x)))
        self.total.update_state(ops.sum(ops.abs(x), axis=(0, 2)))
        return x


def test_what_treats_them_apart_is_exact_where_they_are_along_another_dimension():
    found = []
    for wrap in (lambda model, _: model, lambda model, n: piped(model, stages=n)):
        model = wrap(*turned(lambda: layers.Dense(5, activation="tanh"), Watched))
        compiled(model)
        found.append([model.train_on_batch(TURNED, Y) for _ in range(2)])
        found[-1] += model.get_weights()
    assert distance(*found) < 1e-10


def test_tables_are_not_taken_for_samples_whatever_their_number():
    """A table of as many rows as there are samples, made of all samples."""

    def table(layer, x, _):
        return layer.gain * ops.matmul(ops.transpose(x), x) / 10

    inputs = keras.Input((6,))
    odd = Own(table, name="odd")
    odd.compute_output_shape = lambda _: (6, 6)
    made = odd(layers.Dense(6)(inputs))
    model = keras.Model(inputs, layers.Dense(5)(ops.matmul(layers.Dense(6)(inputs), made)))
    with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
        piped(model, micro_batches=3, stages=5).train_on_batch(RNG.normal(size=(6, 6)), Y)


def test_numbers_with_a_fixed_seed_are_those_of_a_batch_of_the_size_of_a_micro_batch():
    """The gradient of a batch is the mean of those of its micro-batches, each a batch of Keras."""

    def noisy(layer, x, _):
        each = keras.random.normal(ops.shape(x), seed=3)
        return layer.gain * (x + each + keras.random.normal((1, 5), seed=4))

    def trained(steps, accumulated=None, **options):
        model = between(Own(noisy))
        model = PipelineModel(model, **options) if options else model
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=accumulated)
        model.compile(optimizer, "mse")
        for x, y in zip(np.split(X, steps), np.split(Y, steps), strict=True):
            model.train_on_batch(x, y)
        return model.get_weights()

    plain, by_parts = trained(1), trained(3, accumulated=3)
    whole = trained(1, num_stages=1, num_micro_batches=1)
    one_stage, several = (trained(1, num_stages=n, num_micro_batches=3) for n in (1, 4))
    assert distance(plain, whole) < 1e-10
    assert distance(by_parts, one_stage) < 1e-10
    assert distance(one_stage, several) < 1e-13
    assert distance(plain, one_stage) > 1e-3


def test_operations_that_mix_samples_are_named_as_well():
    inputs = keras.Input((5,))
    x = layers.Dense(5)(inputs)
    x = x - ops.mean(x, axis=0, keepdims=True)
    model = piped(keras.Model(inputs, layers.Dense(5)(x)))
    with pytest.raises(UnsupportedModelError, match=r"'mean(_\d+)?' \(Mean\) mixes samples"):
        model.train_on_batch(X, Y)


def test_they_are_refused_in_evaluation_and_prediction_too():
    for run in (lambda m: m.evaluate(X, Y, verbose=0), lambda m: m.predict(X, verbose=0)):
        with pytest.raises(UnsupportedModelError, match="odd"):
            run(piped(between(MIXING["centred"]())))
    model = piped(between(MIXING["training"]()))
    plain = model.predict(X, verbose=0)
    assert distance(plain, between(MIXING["training"]()).predict(X, verbose=0)) < 1e-10


def test_one_micro_batch_trains_them_as_plain_keras():
    found = []
    for wrap in (compiled, lambda model: piped(model, micro_batches=1)):
        model = wrap(between(MIXING["reversed"]()))
        found.append([model.train_on_batch(X, Y) for _ in range(2)])
        found[-1] += model.get_weights()
    assert distance(*found) < 1e-10


def with_windows():
    """Batch and windows in one dimension, as in Swin."""
    inputs = keras.Input((4, 3))
    x = layers.Dense(4)(inputs)
    x = ops.reshape(x, (-1, 2, 4))
    x = layers.Dense(4, activation="tanh")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(5)(ops.reshape(x, (-1, 16))))


def with_not_a_number():
    inputs = keras.Input((5,))
    x = layers.Dense(5)(layers.Lambda(lambda x: ops.where(x > 0, ops.log(x), x / 0.0))(inputs))
    return keras.Model(inputs, layers.Dense(5)(x))


def with_columns():
    """Numbers of categories in a column of floating point numbers, which others do not fit."""
    inputs = keras.Input((5,))
    x = layers.Embedding(4, 3)(ops.cast(inputs[:, 0], "int32"))
    return keras.Model(inputs, layers.Dense(5)(layers.Concatenate()([x, inputs[:, 1:]])))


def trimmed(layer, x, _):
    """Computes as far as the longest sample goes."""
    longest = tf.reduce_max(tf.reduce_sum(tf.cast(x > 0, tf.int32), axis=1))
    padded = tf.pad(tf.sort(x, direction="DESCENDING")[:, :longest], [[0, 0], [0, 5 - longest]])
    return layer.gain * tf.nn.relu(tf.ensure_shape(padded, (None, 5)))


def by_the_largest(layer, x, _):
    """Softmax as one may write it: what all of its numbers are less does not count."""
    powers = ops.exp(layer.gain * x - ops.max(layer.gain * x))
    return powers / ops.sum(powers, axis=-1, keepdims=True)


COLUMNS = np.concatenate([IDS[:, :1] % 4, X[:, 1:]], 1)
APART = {
    "windows": (with_windows, RNG.normal(size=(6, 4, 3))),
    "not a number": (with_not_a_number, X),
    "columns": (with_columns, COLUMNS),
    "by the largest": (lambda: between(Own(by_the_largest)), X),
    "trimmed": (lambda: between(Own(trimmed)), X),
    "zeros": (between, np.zeros((6, 5))),
}


@pytest.mark.parametrize(("name", "rows"), [*((name, 6) for name in APART), ("columns", 3)])
def test_what_treats_each_sample_by_itself_trains(name, rows):
    build, x = APART[name]
    model = piped(build(), stages=1)
    model.train_on_batch(x[:rows], Y[:rows])
    model.predict(x[:rows], verbose=0)


class Experts(layers.Layer):
    """Sends each sample to the best of some products."""

    def build(self, shape):
        self.router = self.add_weight((shape[-1], 4))
        self.kernels = self.add_weight((4, shape[-1], shape[-1]))

    def call(self, x):
        weight, best = ops.top_k(ops.softmax(ops.matmul(x, self.router)), 2)
        chosen = ops.sum(ops.one_hot(best, 4, dtype=x.dtype) * weight[..., None], -2)
        return x + ops.einsum("...d,...n,ndh->...h", x, chosen, self.kernels)

    def compute_output_shape(self, shape):
        return shape


@pytest.fixture(params=["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def precision(request):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(request.param)
    yield request.param
    use_float64()


def test_lower_precision_is_not_taken_for_mixing(precision):
    inputs = keras.Input((12, 16))
    x = Experts()(layers.LayerNormalization()(layers.Dense(16)(inputs)))
    x = layers.MultiHeadAttention(2, 8)(x, x) + Experts()(x)
    x = layers.Conv1D(16, 3, padding="same", activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(5, dtype="float32")(layers.Flatten()(x)))
    x = RNG.normal(size=(8, 12, 16)).astype("float32")
    piped(model, 2).train_on_batch(x, np.ones((8, 5), "float32"))


def slightly_centred(layer, x, _):
    return x - 1e-6 * layer.gain * ops.mean(x, axis=0)


def slightly_counted(layer, x, _):
    return x + layer.gain * 1e-6 * ops.cast(ops.shape(x)[0], x.dtype)


@pytest.mark.parametrize("function", [slightly_centred, slightly_counted])
def test_what_is_mixed_in_ever_so_little_is_told_from_rounding(precision, function):
    with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
        piped(between(Own(function, name="odd"))).train_on_batch(X, Y)


@pytest.mark.slow
def test_half_precision_is_tried_in_single_precision_where_weights_are_large(monkeypatch):
    monkeypatch.setattr(parts, "_MOST_COPIED", 0)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        piped(between(Experts())).train_on_batch(X, Y)
        slightly = Own(lambda layer, x, _: x - 0.01 * layer.gain * ops.mean(x, axis=0), name="odd")
        with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
            piped(between(slightly)).train_on_batch(X, Y)
    finally:
        use_float64()


class Loop(layers.Layer):
    """Drops numbers at random in each turn of a loop, and the mean over the samples if asked to."""

    def __init__(self, mixes, **kwargs):
        super().__init__(**kwargs)
        self.mixes = mixes
        self.drop = layers.Dropout(0.6, seed=1)

    def call(self, x, training=None):
        def turn(i, x):
            x = self.drop(x, training=training)
            return i + 1, x - tf.reduce_mean(x, 0) if self.mixes else x

        return tf.while_loop(lambda i, _: i < 2, turn, [0, x])[1]

    def compute_output_shape(self, shape):
        return shape


def test_loops_that_draw_random_numbers_are_looked_at_too():
    piped(between(Loop(mixes=False))).train_on_batch(X, Y)
    with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
        piped(between(Loop(mixes=True, name="odd"))).train_on_batch(X, Y)


class Spectrum(layers.Layer):
    def call(self, x):
        return tf.signal.fft(tf.cast(x, "complex128"))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex128")


class Magnitude(layers.Layer):
    def call(self, x):
        return tf.abs(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float64")


def test_gradients_of_complex_numbers_cross_cuts():
    found = []
    for wrap in (compiled, lambda model: piped(model, stages=5)):
        model = wrap(between(Spectrum(), Magnitude()))
        found.append([model.train_on_batch(X, Y) for _ in range(2)])
        found[-1] += model.get_weights()
    assert distance(*found) < 1e-10


def counting(layer, x, training):
    if training:
        layer.count.assign_add(1.0)
    return layer.gain * x


def counting_in_a_branch(layer, x, training):
    def count():
        layer.count.assign_add(1.0)
        return 1.0

    tf.cond(tf.size(x) > 0, count, lambda: 0.0)
    return layer.gain * x


WRITING = {
    "counter": lambda: Own(counting, name="odd"),
    "branch": lambda: Own(counting_in_a_branch, name="odd"),
}


@pytest.mark.parametrize("name", WRITING)
def test_layers_that_write_their_state_are_refused_by_name(name):
    model = piped(between(layers.Dropout(0.5, seed=1), WRITING[name]()))
    before = [w.numpy() for w in model._engine.extracted.variables]
    with pytest.raises(UnsupportedModelError, match=r"odd.* writes its variable .*batches=3"):
        model.train_on_batch(X, Y)
    assert distance(before, [w.numpy() for w in model._engine.extracted.variables]) == 0


@pytest.mark.parametrize("name", WRITING)
def test_with_one_micro_batch_they_write_once(name):
    found = []
    for make in (lambda model: model, lambda model: piped(model, micro_batches=1)):
        keras.utils.set_random_seed(2)
        model = compiled(make(between(WRITING[name]())))
        found.append([model.train_on_batch(X, Y) for _ in range(2)])
        found[-1] += model.get_weights()
    assert distance(*found) < 1e-10


GENERATOR = tf.random.Generator.from_seed(3)
RANDOM = {
    "keras": lambda layer, x, _: x + layer.gain * keras.random.normal(ops.shape(x)),
    "python": lambda layer, x, _: x * layer.gain * random.random(),
    "generator": lambda layer, x, _: x + layer.gain * GENERATOR.normal(tf.shape(x), dtype=x.dtype),
    "branch": lambda layer, x, _: tf.cond(
        tf.size(x) > 0, lambda: x * tf.random.uniform((), dtype=x.dtype), lambda: x
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_no_layer_are_refused_by_name(name):
    for stages, micro_batches in ((1, 2), (2, 1)):
        if name == "generator" and micro_batches == 1:
            continue
        model = piped(between(Own(RANDOM[name], name="odd")), micro_batches, stages)
        with pytest.raises(UnsupportedModelError, match="'odd'"):
            model.train_on_batch(X, Y)


def test_one_stage_and_one_micro_batch_draw_them_as_plain_keras():
    found = []
    for stages in (None, 1):
        model = between(Own(RANDOM["keras"]))
        model = model if stages is None else piped(model, 1, 1)
        model.compile(sgd(), "mse")
        keras.utils.set_random_seed(7)
        keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", None)
        found.append([model.train_on_batch(X, Y), *model.get_weights()])
    assert distance(*found) < 1e-10


def test_seeds_of_the_layers_own_do_not_depend_on_the_stages_and_trying_out_moves_none():
    found = []

    def noise(layer, x, _):
        return x + layer.gain * keras.random.normal(ops.shape(x), seed=layer.seed_generator)

    for stages in (1, 2):
        drop = layers.Dropout(0.5, seed=1)
        model = piped(between(Own(noise), drop), 3, stages)
        found.append([model.train_on_batch(X, Y) for _ in range(2)])
        found[-1] += model.get_weights()
        assert np.array(drop.seed_generator.state)[1] == 6
    assert distance(*found) < 1e-13


def tied_past_its_layer():
    """A Lambda reads the table of an embedding, as tied softmax layers do."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,), dtype="int32")
    table = layers.Embedding(7, 4, name="table")
    x = layers.Dense(4, activation="tanh")(table(inputs))
    x = layers.Lambda(lambda x: ops.matmul(x, ops.transpose(table.embeddings)))(x)
    return keras.Model(inputs, layers.Dense(5)(layers.Flatten()(x)))


def test_weights_that_are_read_past_their_layers_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"reads weight 'table/embeddings'"):
        piped(tied_past_its_layer()).train_on_batch(IDS, Y)
    models = compiled(tied_past_its_layer()), piped(tied_past_its_layer(), stages=1)
    found = [[model.train_on_batch(IDS, Y), *model.get_weights()] for model in models]
    assert distance(*found) < 1e-10


class SaysIntegers(layers.Layer):
    def call(self, x):
        return 2 * x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "int32")


@pytest.mark.parametrize("then", [[], [layers.Rescaling(2.0, dtype="float64")]])
def test_gradients_that_plans_do_not_expect_are_refused_by_name(then):
    model = between(SaysIntegers(name="lie"), *then)
    last = then[0].name if then else "lie"
    pipeline = piped(model, balance=[2 + len(then), 2])
    with pytest.raises(
        UnsupportedModelError, match=f"gradient of '{last}' .* declared to have int"
    ):
        pipeline.train_on_batch(X, Y)
    with pytest.raises(UnsupportedModelError, match="gradient of 'lie'"):
        piped(keras.Model(model.input, model.get_layer("lie").output), stages=1).fit(X, Y)


def test_what_rounding_has_switched_once_is_no_mixing(monkeypatch):
    """A ReLU at zero is another with other rounding, and so are the gradients that pass it."""
    honest, once = ProbeTrace.both_ways, [[0]]

    def switched(self, samples):
        for found in honest(self, samples):
            yield found._replace(strange=once.pop()) if once else found

    monkeypatch.setattr(ProbeTrace, "both_ways", switched)
    piped(between()).train_on_batch(X, Y)
    assert not once
