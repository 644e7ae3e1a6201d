"""What mixes samples, writes its state or draws random numbers of no one is refused by name."""

import functools
import gc
import operator
import random
import weakref
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.probes import parts
from tarantella_pp.runtime.probes.constants import constants_of
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace
from tests.helpers.training import distance, in_precision, sgd
from tests.zoo.models import SameShape, chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(2, 6, 5))
IDS = RNG.integers(0, 7, size=(6, 5))
TURNED = RNG.normal(size=(6, 4, 5))
TWELVE = np.concatenate([X, X + 1])
COLUMNS = np.concatenate([IDS[:, :1] % 4, X[:, 1:]], 1)


class Own(SameShape):
    """A layer with a weight to scale its input with, as tests want it."""

    def __init__(self, function, gain="ones", name="odd"):
        super().__init__(name=name)
        self.function = function
        self.gain = self.add_weight(shape=(), initializer=gain, name="gain")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x, training=None):
        return self.function(self, x, training)


def between(*inner):
    keras.utils.set_random_seed(1)
    before = layers.Dense(5, activation="tanh", name="before")
    return chain((5,), before, *inner, layers.Dense(5, name="last"))


def own(function, **options):
    return lambda: between(Own(function, **options))


def compiled(model):
    model.compile(sgd(), "mse", run_eagerly=not isinstance(model, PipelineModel))
    return model


def piped(model, micro_batches=3, stages=1, **options):
    return compiled(PipelineModel(model, stages, num_micro_batches=micro_batches, **options))


def trained(model, x=X, y=Y):
    keras.utils.set_random_seed(7)
    keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", None)
    return [*(model.train_on_batch(x, y) for _ in range(2)), *model.get_weights()]


def apart(build, x=X, **options):
    """How far a pipeline comes from plain Keras."""
    found = []
    for wrap in (compiled, functools.partial(piped, **options)):
        keras.utils.set_random_seed(1)
        found.append(trained(wrap(build()), x))
    return distance(*found)


def centred(layer, x, _):
    return x - layer.gain * ops.mean(x, axis=0, keepdims=True)


def only_in_training(layer, x, training):
    return centred(layer, x, training) if training else x


def crowded(layer, x, _):
    """Two experts, each with room for half of the samples and one; more are left out."""
    to_first = ops.cast(x[:, :1] + 0.0 * layer.gain > 0, x.dtype)
    chosen = ops.concatenate([to_first, 1 - to_first], axis=1)
    room = ops.cast(ops.shape(x)[0] // 2 + 1, x.dtype)
    kept = ops.sum(chosen * ops.cast(ops.cumsum(chosen, axis=0) <= room, x.dtype), axis=1)
    return layer.gain * x * kept[:, None]


def counted(layer, x, _):
    return layer.gain * x / ops.cast(ops.shape(x)[0], x.dtype)


def clipped_on_the_way_back(layer, x, _):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 1e6)

    return clipped(layer.gain * x)


def one_by_one(layer, x, _):
    return ops.stack([layer.gain * sample for sample in ops.unstack(x)])


def mix_up():
    parts = layers.Reshape((5, 1, 1)), layers.MixUp(seed=3), layers.Flatten()
    return keras.Sequential(parts, name="odd")


def shifted_by_operations():
    first, last = layers.Dense(5), layers.Dense(5)
    return chain((5,), first, lambda x: x - ops.mean(x, axis=0, keepdims=True), last)


class Loop(SameShape):
    """Drops numbers at random in each turn of a loop, and the mean over the samples if asked to."""

    def __init__(self, mixes, name="odd"):
        super().__init__(name=name)
        self.mixes = mixes
        self.drop = layers.Dropout(0.6, seed=1)

    def call(self, x, training=None):
        def turn(i, x):
            x = self.drop(x, training=training)
            return i + 1, x - tf.reduce_mean(x, 0) if self.mixes else x

        return tf.while_loop(lambda i, _: i < 2, turn, [0, x])[1]


def until_small(x, halves=None):
    """Halves numbers until all are small: all of them, or those that are not."""

    def turn(x):
        return [tf.where(ops.abs(x) > 1e-3 if halves is None else halves, x / 2, x)]

    return tf.while_loop(lambda x: tf.reduce_any(ops.abs(x) > 1e-3), turn, [x])[0]


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


GENERATOR = tf.random.Generator.from_seed(3)


def turned(*inner):
    """Time before samples, where cuts are."""
    turn = functools.partial(ops.transpose, axes=(1, 0, 2))
    start, end = layers.Dense(5, activation="tanh"), (layers.Flatten(), layers.Dense(5))
    return chain((4, 5), start, turn, *inner, turn, *end)


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


def table_of_samples():
    """A table of as many rows as there are samples, made of all samples."""
    inputs, x = keras.Input((5,)), Own(lambda o, x, _: o.gain * ops.matmul(ops.transpose(x), x))
    x.compute_output_shape = lambda _: (6, 6)
    made = x(layers.Dense(6)(inputs))
    return keras.Model(inputs, layers.Dense(5)(ops.matmul(layers.Dense(6)(inputs), made)))


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


def routed(layer, x, _):
    """Scales two kinds of samples, each kind by itself."""
    kind = tf.cast(x[:, 0] > 0, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), kind, 2)
    first, second = tf.dynamic_partition(x, kind, 2)
    return tf.dynamic_stitch(places, [layer.gain * first, 2.0 * second])


def few_centred(layer, x, _):
    """Takes the mean of samples of which there are none in a trial."""
    few = tf.where(x[:, 0] > 50)
    found = tf.gather_nd(x, few)
    return layer.gain * tf.tensor_scatter_nd_update(x, few, found - tf.reduce_mean(found, 0))


def by_the_largest(layer, x, _):
    """Softmax as one may write it: what all of its numbers are less does not count."""
    powers = ops.exp(layer.gain * x - ops.max(layer.gain * x))
    return powers / ops.sum(powers, axis=-1, keepdims=True)


def in_a_function(layer, x, _):
    """Reads its weight in a function of its own."""
    return tf.function(lambda x: tf.matmul(x, layer.gain * tf.eye(5, dtype=x.dtype)))(x)


def saturated(layer, x, _):
    """Gradients are what rounding leaves of `1 - tanh(x) ** 2`."""
    return ops.tanh(17 + 0.1 * layer.gain * x)


class GivesNone(layers.Layer):
    """Says two tensors, and gives one, as a layer of XLNet does."""

    def call(self, x):
        return x, None

    def compute_output_spec(self, x):
        return tuple(keras.KerasTensor(x.shape, x.dtype) for _ in range(2))


def side_by_side():
    inputs = keras.Input((5,))
    x = layers.Dense(5, activation="tanh")(inputs)
    functions = saturated, by_the_largest, in_a_function, trimmed
    parts = [Own(function, name=function.__name__)(x) for function in functions]
    return keras.Model(inputs, layers.Dense(5)(layers.Add()([*parts, Loop(False, "loop")(x)])))


class Declared(layers.Layer):
    def __init__(self, function, dtype, name=None):
        super().__init__(name=name, autocast=False)
        self.function, self.declared = function, dtype

    def call(self, x):
        return self.function(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.declared)


def spectrum():
    return Declared(lambda x: tf.signal.fft(tf.cast(x, "complex128")), "complex128")


def declared(function, dtype):
    return lambda: between(Declared(function, dtype), layers.Rescaling(2.0, dtype="float64"))


class Said(keras.Operation):
    """An operation of one's own, which is believed what it says."""

    def call(self, x):
        return 2 * x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "int32")


def said():
    return chain((5,), layers.Dense(5), Said(name="lie"))


def tied_past_its_layer():
    """A Lambda reads the table of an embedding, as tied softmax layers do."""
    table, tanh = layers.Embedding(7, 4, name="table"), layers.Dense(4, activation="tanh")
    again = layers.Lambda(lambda x: ops.matmul(x, ops.transpose(table.embeddings)))
    return chain((5,), table, tanh, again, layers.Flatten(), layers.Dense(5), dtype="int32")


def reads_past(first, name, around=lambda function: function):
    """A Lambda scales with a weight of the first layer."""
    first.build((None, 5))
    weight = next(w for w in first.weights if w.name == name)
    reads = layers.Lambda(around(lambda x: x * ops.sum(weight)))
    return chain((5,), first, layers.Dense(5), reads)


def reads_frozen():
    return reads_past(layers.Dense(5, trainable=False), "kernel")


def stateful():
    both = layers.Bidirectional(layers.LSTM(3, stateful=True))
    return chain(None, both, layers.Dense(5), batch_shape=(6, 4, 5))


class Centred(layers.Layer):
    """Reads the moving averages that its batch normalization has just changed."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5, name="norm")

    def call(self, x, training=None):
        return self.norm(x, training=training) - self.norm.moving_mean


class InTraining(layers.Layer):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2, kernel_initializer="identity")

    def call(self, x, training=None):
        if training:
            self.add_loss(ops.mean(self.head(x) ** 2))
        return x


def bent():
    """Layers make weights when they first run, or first train."""
    activation = layers.PReLU(alpha_initializer="ones")
    dense = layers.Dense(5, activation=activation, kernel_initializer="identity")
    return between(dense, InTraining())


def given():
    """An operation that is no layer is given a weight."""
    inputs, first = keras.Input((5,)), layers.Dense(5, bias_initializer="ones")
    x = layers.Dense(5, activation="tanh")(layers.Dense(5, activation="tanh")(first(inputs)))
    return keras.Model(inputs, layers.Dense(5)(x * first.bias))


def fixed():
    x = keras.Input(batch_shape=(12, 5))
    return keras.Model(x, layers.Dense(5)(ops.reshape(layers.Dense(5)(x), (x.shape[0], 5))))


def counting_in_python(layer, x, _):
    layer.calls = getattr(layer, "calls", 0) + 1
    return layer.calls * layer.gain * x


def slowly(rows, told):
    """Leaves rows to the whole run that options tell of."""
    return [pytest.param(*row, marks=[pytest.mark.slow] * bool(told(row[-1]))) for row in rows]


MIXES = "odd.* mixes samples.*num_micro_batches=1"
COUNTS = r"number of samples.*num_micro_batches=1"
FEWER = r"does not run with fewer samples.*num_micro_batches=1.*without batch_shape"
WRITES = "odd.* writes its variable .* 3 times .* of all replicas"
DRAWS = "'odd'.*draws random numbers"
SHAPE = "gives a shape .* Keep padding"
JUST = r"norm/moving_mean' is read .* just"
DROP = functools.partial(layers.Dropout, 0.5, seed=1)
MIXING = {
    "crowded": crowded,
    "few centred": few_centred,
    "in training": only_in_training,
    "reversed": lambda layer, x, _: layer.gain * x + ops.flip(x, axis=0),
    "rarely halved": lambda o, x, _: o.gain * ops.where(ops.any(ops.abs(x) > 50), 0.5 * x, x),
    "rarely scaled": lambda o, x, _: o.gain * x / ops.maximum(ops.max(ops.abs(x), axis=0), 100.0),
    "until all are small": lambda layer, x, _: layer.gain * until_small(x, ops.ones_like(x) > 0),
    "rarely shifted": lambda layer, x, _: layer.gain * x + ops.sum(ops.relu(x - 50.0)),
}
COUNTED = (
    counted,
    lambda o, x, _: o.gain * x * ops.cast(1 + ops.arange(ops.shape(x)[0])[:, None], x.dtype),
)
IN_FOURS = (  # as many samples as a micro-batch has
    lambda layer, x, _: layer.gain * ops.where(ops.equal(ops.shape(x)[0], 4), 3 * x, x),
    lambda layer, x, _: layer.gain * (3 * x if x.shape[0] == 4 else x),
)
DRAWING = {
    "no generator": lambda layer, x, _: x + layer.gain * keras.random.normal(ops.shape(x)),
    "Python": lambda layer, x, _: x * layer.gain * random.random(),
    "in a branch": lambda layer, x, _: tf.cond(
        tf.size(x) > 0, lambda: x * tf.random.uniform((), dtype=x.dtype), lambda: x
    ),
}
ALONG_TIME = {
    "odd.*mixes": lambda layer, x, _: x + (layer.gain - 1) * ops.mean(x, 1, keepdims=True),
    "odd.*number": lambda layer, x, _: layer.gain * x / ops.cast(ops.shape(x)[1], x.dtype),
}
COUNTING = counting, counting_in_a_branch
ONE, TWO = {"micro_batches": 1}, {"micro_batches": 1, "stages": 2}
ALONG, LAYERS = {"stages": 2, "balance": [2, 4]}, {"stages": 2, "balance": [3, 4]}


def slope(pair):
    return tf.gradients(*pair, unconnected_gradients="zero")[0]


def physical(start=0):
    """The gradient of a network by its input, or by what the first layers make of it."""
    keras.utils.set_random_seed(1)
    made = [keras.Input((5,))]
    for _ in range(3):
        made.append(layers.Dense(5, activation="tanh")(made[-1]))
    odd = layers.Lambda(slope, name="odd")([made[-1], made[start]])
    return keras.Model(made[0], layers.Dense(5)(odd))


REFUSED = [
    (physical, r"'odd' calls tf\.gradients", {"stages": 2, "balance": [2, 3]}),
    *((own(function), MIXES, {}) for function in MIXING.values()),
    (own(centred, gain="zeros"), MIXES, {}),
    (own(centred, gain="zeros"), MIXES, {"x": X[:3]}),  # one in each micro-batch
    (lambda: between(layers.Lambda(lambda x: x - ops.mean(x, axis=0), name="odd")), MIXES, {}),
    (lambda: between(mix_up()), MIXES, {}),
    (lambda: between(Loop(mixes=True)), MIXES, {}),
    *((own(function), f"'odd'.*{COUNTS}", {}) for function in COUNTED),
    *((own(function), COUNTS, {"x": TWELVE}) for function in IN_FOURS),
    # Fails for one sample alone.
    (
        own(lambda layer, x, _: x * layer.gain * ops.mean(ops.top_k(ops.transpose(x), 2)[0])),
        f"Layer 'odd' {FEWER}",
        {"x": TWELVE, "stages": 2},
    ),
    (fixed, FEWER, {"x": TWELVE, "stages": 2}),
    (own(one_by_one), r"fewer samples.*layer 'odd'", {}),
    (own(lambda layer, x, _: layer.gain * x + ops.ones((8, 1))), "'odd'.*batches=1", {"x": X[:8]}),
    (own(clipped_on_the_way_back), "mixes samples", {}),
    (
        own(
            lambda o, x, _: tf.ensure_shape(tf.py_function(tf.sin, [o.gain * x], x.dtype), x.shape)
        ),
        "'odd' calls tf.py_function",
        {},
    ),
    (shifted_by_operations, r"'mean(_\d+)?' \(Mean\) mixes samples", {}),
    *(
        (lambda function=function: between(DROP(), Own(function)), WRITES, options)
        for function, options in zip(COUNTING, ({}, ONE | {"num_replicas": 3}), strict=True)
    ),
    (own(lambda o, x, _: x + o.gain * GENERATOR.normal(tf.shape(x), dtype=x.dtype)), "'odd'", {}),
    *((own(function), DRAWS, {}) for function in DRAWING.values()),
    (own(DRAWING["Python"]), DRAWS, {"micro_batches": 1, "stages": 2}),
    (own(counting_in_python), "'odd'.*counts in Python", {"micro_batches": 1, "stages": 2}),
    *(
        (lambda function=function: turned(Own(function)), told, {"x": TURNED} | ALONG)
        for told, function in ALONG_TIME.items()
    ),
    (
        own(lambda layer, x, _: layer.gain * tf.boolean_mask(x, x[:, 0] > 0)),
        rf"'odd' \(Own\) {SHAPE}",
        {"stages": 2, "balance": [2, 1]},
    ),
    (own(lambda o, x, _: o.gain * x[:, : tf.reduce_max(tf.where(x < 9)) + 1]), SHAPE, {}),
    (table_of_samples, "'odd'.*mixes samples", {"stages": 2, "balance": [3, 2]}),
    # Gradients that plans do not expect.
    (said, r"gradient of 'lie' .* have integers", {"stages": 2, "balance": [1, 1]}),
    (tied_past_its_layer, r"reads weight 'table/embeddings'", {"x": IDS, "stages": 2}),
    (
        lambda: reads_past(layers.Dense(5), "kernel", keras.remat),
        r"reads weight '.*kernel'.* keras.remat .* gradient would be lost",
        {"stages": 2},
    ),
    (
        lambda: reads_past(layers.BatchNormalization(), "moving_mean"),
        r"reads weight '.*moving_mean'.* new values",
        {"stages": 2},
    ),
    *((lambda: between(Centred()), JUST, {"stages": stages}) for stages in (1, 2)),
]


@pytest.mark.parametrize(("build", "message", "options"), slowly(REFUSED, lambda given: given))
def test_what_is_no_sum_over_samples_is_refused_by_name(build, message, options):
    x = options.get("x", X)
    model = piped(build(), **{name: value for name, value in options.items() if name != "x"})
    variables = model._engine.extracted.variables
    before = [w.numpy() for w in variables]
    with pytest.raises(UnsupportedModelError, match=message):
        model.train_on_batch(x, np.concatenate([Y, Y])[: len(x)])
    assert distance(before, [w.numpy() for w in variables]) == 0
    assert int(model.optimizer.iterations) == 0


LIES = {"stages": 2, "balance": [2, 2]}
EXACT = [
    (lambda: between(*map(Own, (MIXING["reversed"], *COUNTING), ["ones"] * 3, "abc")), X, TWO),
    (own(DRAWING["no generator"]), X, ONE),
    (own(one_by_one), X, TWO),
    (stateful, TURNED, {**TWO, "recompute": "all"}),
    *((own(routed), X, {"stages": stages}) for stages in (1, 2)),
    (own(lambda layer, x, _: layer.gain * until_small(x)), X, {"stages": 2}),
    (own(lambda layer, x, _: layer.gain * tf.map_fn(lambda row: layer.gain * row, x)), X, {}),
    # What treats samples apart, where they are along another dimension.
    (lambda: turned(layers.Dense(5, activation="tanh"), Watched()), TURNED, LAYERS),
    (lambda: between(spectrum(), Declared(tf.abs, "float64")), X, LIES),
    # What is said of dtypes need not be true of layers.
    (declared(lambda x: 2 * x, "int32"), X, LIES),
    (declared(lambda x: x > 0, "float64"), X, LIES),
    (tied_past_its_layer, IDS, {}),
    (lambda: between(GivesNone(), operator.itemgetter(0)), X, {"stages": 2}),
    (reads_frozen, X, {"stages": 2}),
    *((lambda: between(Centred()), X, options) for options in (ONE, TWO)),
    # Weights that no layer of a stage has.
    *((build, X, {"stages": 2}) for build in (bent, given)),
]


@pytest.mark.parametrize(("build", "x", "options"), slowly(EXACT, lambda given: "balance" in given))
def test_what_is_none_or_is_not_cut_is_exact(build, x, options):
    assert apart(build, x, **options) < (1e-13 if options.get("micro_batches") == 1 else 1e-10)


def test_a_batch_that_states_have_rows_for_is_not_cut():
    with pytest.raises(UnsupportedModelError, match=r"_lstm\w* are stateful.*Received: 3"):
        piped(stateful())


def test_layers_are_refused_in_evaluation_and_prediction_too():
    with pytest.raises(UnsupportedModelError, match=MIXES):
        piped(between(Own(centred))).evaluate(X, Y, verbose=0)
    with pytest.raises(UnsupportedModelError, match=COUNTS):
        piped(between(Own(counted))).predict(X, verbose=0)
    model = between(Own(only_in_training))
    plain = model.predict(X, verbose=0)
    assert distance(plain, piped(model).predict(X, verbose=0)) < 1e-10


@pytest.mark.slow
def test_numbers_with_a_fixed_seed_are_those_of_a_batch_of_the_size_of_a_micro_batch():
    """The gradient of a batch is the mean of those of its micro-batches, each a batch of Keras."""

    def noisy(layer, x, _):
        each = keras.random.normal(ops.shape(x), seed=3)
        return layer.gain * (x + each + keras.random.normal((1, 5), seed=4))

    def trained_once(steps, accumulated=None, **options):
        model = between(Own(noisy))
        model = PipelineModel(model, **options) if options else model
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=accumulated)
        model.compile(optimizer, "mse")
        for x, y in zip(np.split(X, steps), np.split(Y, steps), strict=True):
            model.train_on_batch(x, y)
        return model.get_weights()

    plain, by_parts = trained_once(1), trained_once(3, accumulated=3)
    one_stage, several = (trained_once(1, num_stages=n, num_micro_batches=3) for n in (1, 3))
    assert distance(by_parts, one_stage) < 1e-10
    assert distance(one_stage, several) < 1e-13
    assert distance(plain, one_stage) > 1e-3


def in_windows(layer, x, _):
    """Draws several numbers for each sample, one behind the other."""
    drawn = keras.random.normal((ops.size(x),), seed=layer.seed_generator)
    return layer.gain * x + ops.reshape(drawn, ops.shape(x))


APART = {
    "in windows": (own(in_windows), X),
    "side by side": (side_by_side, X),
    "columns": (with_columns, COLUMNS),
    "columns of few": (with_columns, COLUMNS[:3]),
    "not a number": (own(lambda o, x, _: ops.where(x > 0, o.gain * ops.log(x), x / 0.0)), X),
    "zeros": (between, np.zeros((6, 5))),
    "computed again": (own(lambda o, x, _: keras.remat(lambda x: ops.tanh(o.gain * x))(x)), X),
}


@pytest.mark.parametrize("name", APART)
def test_what_treats_each_sample_by_itself_trains(name):
    build, x = APART[name]
    model = piped(build())
    model.train_on_batch(x, Y[: len(x)])
    model.predict(x, verbose=0)


class Experts(SameShape):
    """Sends each sample to the best of some products."""

    def build(self, shape):
        self.router = self.add_weight((shape[-1], 4))
        self.kernels = self.add_weight((4, shape[-1], shape[-1]))

    def call(self, x):
        weight, best = ops.top_k(ops.softmax(ops.matmul(x, self.router)), 2)
        chosen = ops.sum(ops.one_hot(best, 4, dtype=x.dtype) * weight[..., None], -2)
        return x + ops.einsum("...d,...n,ndh->...h", x, chosen, self.kernels)


@pytest.mark.slow
def test_what_is_mixed_in_ever_so_little_is_told_from_rounding():
    for policy in ("float32", "mixed_bfloat16"):
        with in_precision("float32", policy):
            for slightly in (
                lambda layer, x, _: x - 1e-6 * layer.gain * ops.mean(x, axis=0),
                lambda layer, x, _: x + layer.gain * 1e-6 * ops.cast(ops.shape(x)[0], x.dtype),
            ):
                with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
                    piped(between(Own(slightly))).train_on_batch(X, Y)
    with in_precision("float32", "mixed_bfloat16"):
        inputs = keras.Input((12, 16))
        x = Experts()(layers.LayerNormalization()(layers.Dense(16)(inputs)))
        x = layers.MultiHeadAttention(2, 8)(x, x) + Experts()(x)
        x = layers.Conv1D(16, 3, padding="same", activation="gelu")(x)
        model = keras.Model(inputs, layers.Dense(5, dtype="float32")(layers.Flatten()(x)))
        x = RNG.normal(size=(8, 12, 16)).astype("float32")
        piped(model, 2).train_on_batch(x, np.ones((8, 5), "float32"))
    with in_precision("bfloat16", "bfloat16"):
        piped(between()).train_on_batch(X, Y)


@pytest.mark.slow
def test_half_precision_is_tried_in_single_precision_where_weights_are_large(monkeypatch):
    monkeypatch.setattr(parts, "_MOST_COPIED", 0)
    slightly = Own(lambda layer, x, _: x - 0.01 * layer.gain * ops.mean(x, axis=0))
    with in_precision("float32", "mixed_bfloat16"):
        piped(between(Experts())).train_on_batch(X, Y)
        with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
            piped(between(slightly)).train_on_batch(X, Y)


def test_large_trials_have_few_samples_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(parts, "_MOST_COMPUTED", 0)
    traces, tried = [], []
    kept = ProbeTrace.compare

    def compare(trace, samples, *args, **options):
        tried.append(samples.rows)
        traces.append(weakref.ref(trace))
        return kept(trace, samples, *args, **options)

    monkeypatch.setattr(ProbeTrace, "compare", compare)
    slightly = Own(lambda layer, x, _: x - 1e-3 * layer.gain * ops.mean(x, axis=0))
    gc.disable()
    try:
        assert apart(between) < 1e-13
        assert set(tried) == {3}
        assert not any(trace() for trace in traces)
    finally:
        gc.enable()
    for rows in (3, 12):
        with pytest.raises(UnsupportedModelError, match=r"'odd'.*mixes samples"):
            piped(between(slightly)).train_on_batch(TWELVE[:rows], TWELVE[:rows])


def test_seeds_of_the_layers_own_do_not_depend_on_the_stages_and_trying_out_moves_none():
    found = []

    def noise(layer, x, _):
        return x + layer.gain * keras.random.normal(ops.shape(x), seed=layer.seed_generator)

    for stages in (1, 2):
        drop = layers.Dropout(0.5, seed=1)
        found.append(trained(piped(between(Own(noise), drop), 3, stages)))
        assert np.array(drop.seed_generator.state)[1] == 6
    assert distance(*found) < 1e-13


class Near(keras.regularizers.Regularizer):
    def __init__(self, other):
        self.other = other

    def __call__(self, weight):
        return ops.sum(ops.square(weight - self.other))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("loss", "before/kernel"),
        ("metric", "norm/moving_mean"),
        ("regularizer", "before/kernel"),
        ("regularizer", "norm/moving_mean"),
    ],
)
def test_functions_that_read_weights_past_what_they_are_given_are_refused_by_name(what, name):
    model = between(layers.BatchNormalization(name="norm"))
    weight, last = next(w for w in model.weights if w.path == name), model.layers[-1]

    def reading(y, y_pred):
        return ops.mean(ops.square(y - y_pred), -1) + ops.sum(ops.square(weight))

    if what == "regularizer":
        last.kernel_regularizer = last.kernel.regularizer = Near(weight)
    model = PipelineModel(model, 1, num_micro_batches=3)
    metrics = [reading] if what == "metric" else None
    model.compile(sgd(), reading if what == "loss" else "mse", metrics=metrics)
    with pytest.raises(UnsupportedModelError, match=f"(?i){what}.* reads weight '{name}'"):
        model.train_on_batch(X, Y)


def test_constants_do_not_follow_from_the_order_of_functions():
    loop = lambda x, n: tf.while_loop(lambda i, _: i < n, lambda i, x: (i + 1, 2 * x), (0, x))[1]  # noqa: E731
    function = tf.function(lambda x: loop(loop(x, 3), 5)).get_concrete_function(1.0)
    found = []
    for order in (1, -1):
        definition = function.graph.as_graph_def()
        bodies = [*definition.library.function]
        definition.library.ClearField("function")
        definition.library.function.extend(bodies[::order])
        graph = SimpleNamespace(as_graph_def=lambda d=definition: d, captures=(), variables=())
        found.append([number for _, number in constants_of(SimpleNamespace(graph=graph))])
    assert found[0] == found[1]


def test_ids_may_be_floats():
    def build():
        return chain((X.shape[1],), layers.Embedding(7, 4), layers.LSTM(Y.shape[1]))

    assert apart(build, RNG.integers(0, 7, X.shape).astype("float64")) < 1e-13


def regularized(regularizer):
    model = between()
    model.layers[-1].kernel.regularizer = regularizer
    return model


def test_regularizers_are_functions_of_weights():
    seed, kept = keras.random.SeedGenerator(1), keras.Variable(1.0)
    draws = lambda w: keras.random.normal((), seed=seed, dtype=w.dtype) * ops.sum(w)  # noqa: E731
    keeps = lambda w: kept.assign_add(1.0) * ops.sum(w.value)  # noqa: E731
    numpys = lambda w: np.random.default_rng().normal() * ops.sum(w)  # noqa: E731
    for odd, said in (
        (draws, "writes a"),
        (keeps, "writes a"),
        (numpys, "draws random numbers of"),
    ):
        model = piped(regularized(odd))
        with pytest.raises(UnsupportedModelError, match=rf"of '.*/kernel' {said}"):
            model.train_on_batch(X, Y)
    for odd in (lambda w: ops.sum(w**2, keepdims=True), lambda _: ops.ones(())):
        assert apart(lambda odd=odd: regularized(odd)) < 1e-13


def test_gradients_that_a_layer_takes_within_a_stage_are_exact():
    options = {"stages": 1}, {"stages": 2, "balance": [2, 3]}
    found = [trained(piped(physical(start=2), **each)) for each in options]
    assert distance(*found) < 1e-13


def keep(layer, x, _):
    layer.kept = layer.gain * x
    return x + layer.kept


@pytest.mark.parametrize("calls", [0, 1])
def test_tensors_that_layers_keep_of_their_calls_are_refused_elsewhere(calls):
    def build(stages, **options):
        keeper = Own(keep, name="keeper")
        model = between(keeper, layers.Dense(5), Own(lambda _, x, __: x - keeper.kept))
        made = piped(model, stages=stages, **options)
        for _ in range(calls):
            keeper(X)  # as for looking at features: keeps numbers
        return made, keeper

    with pytest.raises(UnsupportedModelError, match=r"'odd' reads '.*keeper.*make it an output"):
        build(2, balance=[2, 3])[0].train_on_batch(X, Y)
    model, keeper = build(1)
    trained(model)

    def train():
        model.compile(sgd(), lambda y, p: ops.mean((y - p - ops.mean(keeper.kept)) ** 2, -1))
        model.train_on_batch(X, Y)

    with pytest.raises(UnsupportedModelError, match=r"(?i)loss.* reads '.*keeper"):
        train()


def test_what_rounding_has_switched_once_is_no_mixing(monkeypatch):
    """A ReLU at zero is another with other rounding, and so are the gradients that pass it."""
    honest, once = ProbeTrace.both_ways, [[0]]

    def switched(self, samples):
        for found in honest(self, samples):
            yield found._replace(strange=once.pop()) if once else found

    monkeypatch.setattr(ProbeTrace, "both_ways", switched)
    piped(between()).train_on_batch(X, Y)
    assert not once
