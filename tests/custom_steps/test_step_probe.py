"""Which steps replicas may run, found by trying them with samples: what for, and why not."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tarantella_pp.custom_steps.step_probe import found_kinds
from tarantella_pp.custom_steps.step_trace import StepTrace
from tarantella_pp.errors import UnsupportedModelError
from tests.helpers.own_steps import CASES, Regression, SumOfLosses, X, Y

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]


def traced(model, *optimizers, name="train_step"):
    model.compile(*(optimizers or (keras.optimizers.SGD(0.1),)))
    specs = [tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 3], tf.float64)]
    step = getattr(model, name)
    for _ in range(2):  # the first one makes the variables
        found = StepTrace(lambda *data: step(data), specs, name)
    return found


def kinds(model, *optimizers, rows=4, **options):
    trace = traced(model, *optimizers, **options)
    given = [tf.constant(X[:rows]), tf.constant(Y[:rows])]
    return trace, found_kinds(trace, given)


def test_digests_tell_numbers_from_others():
    def scaled(*numbers):
        model, factors = Regression(), tf.constant(np.repeat(numbers, 150))  # captured
        model.loss_of = lambda x, y: (factors[0] * tf.reduce_mean(model(x)), y)
        return traced(model).digest()

    assert scaled(1.0, 2.0) == scaled(1.0, 2.0) != scaled(1.0, 2.5)


class Noisy(Regression):
    """Draws numbers for each sample, twice, and for the weights."""

    def __init__(self):
        super().__init__()
        self.drop = keras.layers.Dropout(0.4, seed=1)
        self.seeds = keras.random.SeedGenerator(2)

    def loss_of(self, x, y):
        twice = tf.concat([x, x], axis=0)
        noise = keras.random.normal(tf.shape(twice), dtype="float64", seed=self.seeds)
        hidden = self.first(self.drop(twice + noise, training=True))
        shift = keras.random.normal((3,), dtype="float64", seed=self.seeds)
        both = tf.concat([y, y], axis=0)
        return self.reduce(tf.square(self.last(hidden) + shift - both)), self(x)


class SumAnnealed(SumOfLosses):
    """A sum that does not count at first."""

    def __init__(self):
        super().__init__()
        self.share = self.add_weight((), "zeros", trainable=False)

    def reduce(self, values):
        return self.share * tf.reduce_sum(values)


class Annealed(SumAnnealed):
    """One more term, and what it is for the logs, that do not count at first."""

    def __init__(self, term):
        super().__init__()
        self.term, self.last = term, keras.layers.Dense(3, kernel_initializer="zeros")

    def loss_of(self, x, y):
        predicted = self(x)
        added = self.share * self.term(predicted)
        self.tracker.update_state(added)
        return tf.reduce_mean(tf.square(predicted - y)) + added, predicted

    def logs(self, loss, y, predicted):
        return {}


def test_what_does_not_count_at_first_is_of_its_own_kind():
    _, found = kinds(SumAnnealed())
    assert {*found.gradients[0]} == {"sum"}
    trace, found = kinds(Annealed(tf.reduce_mean))
    assert {*found.gradients[0]} == {"mean"}
    written = dict(zip([v.name for v in trace.written], found.state, strict=True))
    assert {k.split("/")[-1]: v for k, v in written.items()} == {
        "total:0": "mean",
        "count:0": "same",
    }


@pytest.mark.parametrize("rows", [1, 4])
def test_means_sums_and_what_is_the_same(rows):
    trace, found = kinds(Regression(), rows=rows)
    assert {*found.gradients[0]} == {"mean"}
    assert dict(zip(trace.names, found.results, strict=True)) == {
        "raw": "mean", "steps": "same", "loss": "same", "mae": "same",
    }  # fmt: skip
    assert sorted(found.state) == ["mean", "same", "sum", "sum"]
    _, sums = kinds(CASES["sum"][0](), rows=rows)
    assert {*sums.gradients[0]} == {"sum"}


def test_random_numbers_are_those_of_the_samples_and_trying_changes_nothing():
    model = Noisy()
    warns = pytest.warns(match="numbers for all of them with one generator .*seed_generator")
    trace = traced(model)
    variables = [*model.variables, *model.tracker.variables, model.seeds.state]
    before = [np.array(v) for v in variables]
    with warns:
        found = found_kinds(trace, [tf.constant(X[:4]), tf.constant(Y[:4])])
    assert all(np.array_equal(a, v) for a, v in zip(before, variables, strict=True))
    assert {*found.gradients[0]} == {"mean"}
    assert [steps for _, steps in found.drawn] == [[0, 2], [0, 1]]


class Rare(Regression):
    """Some samples count by a mean of their own."""

    def loss_of(self, x, y):
        result = self(x)
        kept = tf.cast(x[:, :1] > 100.0, x.dtype)
        rare = tf.math.divide_no_nan(tf.reduce_sum(kept * result), tf.reduce_sum(kept))
        return self.reduce(tf.square(result - y)) + rare, result


def test_samples_of_a_rare_kind_are_found_anywhere_in_a_batch():
    trace = traced(Rare())
    x, y = np.tile(X[:1], (48, 1)), np.tile(Y[:1], (48, 1))
    x[[20, 29, 43], 0] = (401.0, 402.0, 403.0)
    with pytest.raises(UnsupportedModelError, match="neither a mean nor a sum over the samples"):
        found_kinds(trace, [tf.constant(x), tf.constant(y)])


class Reparametrized(Regression):
    """Weights that follow from others, and a term that counts in some steps only."""

    def build(self, shape):
        self.form = self.add_weight((shape[-1], 8), name="shape")
        self.noise = self.add_weight((), "zeros", name="noise")
        self.steps = self.add_weight((), "zeros", trainable=False, name="steps")

    def call(self, x):
        kernel = tf.tanh(self.form) / tf.norm(self.form)
        return self.last(x @ (tf.nn.softplus(kernel) + self.first.bias))

    def loss_of(self, x, y):
        self.first(x)
        predicted = self(x)
        error = tf.reduce_mean(tf.square(predicted - y))
        loss = tf.exp(-self.noise) * error + self.noise
        self.steps.assign_add(1.0)
        return tf.where(self.steps > 3.0, 2.0 * loss, loss), predicted


def test_what_follows_from_weights_alone_may_do_so_in_any_way():
    _, found = kinds(Reparametrized())
    assert {*found.gradients[0]} == {"mean", None}


def contrastive(x, y):
    apart = tf.matmul(x, y, transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(apart, axis=1) - tf.linalg.diag_part(apart))


def variant(kind=Regression, **methods):
    return type("Variant", (kind,), methods)


def logging(log):
    """A model that also logs something of its predictions."""
    return variant(logs=lambda model, loss, y, predicted: {"odd": log(loss, predicted)})


def losing(loss):
    return variant(
        loss_of=lambda model, x, y: (loss(model, x, y, predicted := model(x)), predicted)
    )


def before_the_end(model, loss, y, predicted):
    """Reads a metric that is updated once more afterwards."""
    model.error.update_state(y, predicted)
    before = model.error.result()
    model.error.update_state(y, predicted)
    return {"before": before}


@tf.function
def in_a_function(model, loss, y, predicted):
    model.tracker.update_state(tf.minimum(loss, 1e6))
    return {"loss": loss}


def clipping(clip):
    """Changes gradients by what no gradient of the first batch reaches."""

    def train_step(model, data):
        with tf.GradientTape() as tape:
            loss, _ = model.loss_of(*data)
        gradients = tape.gradient(loss, model.trainable_weights)
        model.optimizer.apply(clip(gradients), model.trainable_weights)
        return {"loss": loss}

    return variant(train_step=train_step)


def none_if_large(gradients):
    small = tf.linalg.global_norm(gradients) < 1e6
    return [tf.where(small, gradient, tf.zeros_like(gradient)) for gradient in gradients]


class LargestSeen(Regression):
    def __init__(self, start=-100.0):
        super().__init__()
        start = keras.initializers.Constant(start)
        self.largest = self.add_weight((), start, name="largest", trainable=False)

    def logs(self, loss, y, predicted):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(predicted)))
        return super().logs(loss, y, predicted)


def in_a_condition(model, data):
    step = functools.partial(Regression.train_step, model)
    return tf.cond(tf.reduce_sum(data[0]) > 0, lambda: step(data)["raw"], lambda: 0.0)


def with_numbers(model, x, y, _):
    return tf.reduce_mean(tf.square(model(x + tf.random.normal(tf.shape(x), dtype=x.dtype)) - y))


def of_nothing(model, x, y, predicted):
    """Counts what is not a number only."""
    return tf.reduce_mean(tf.square(predicted) * tf.cast(tf.math.is_nan(y), y.dtype))


def free_bits(model, x, y, predicted):
    """The mean over the samples counts as far as it is above some value, as it is at first."""
    return tf.maximum(tf.reduce_mean(tf.square(predicted - y)), 1e-6)


def of_some(model, x, y, predicted):
    """A mean over samples of some kind, as all are at first."""
    return tf.reduce_mean(tf.boolean_mask(tf.square(predicted - y), y[:, 0] < 1e6))


def of_hardest(model, x, y, predicted):
    """Takes those samples of a batch that are farthest off."""
    worst = tf.math.top_k(tf.reduce_mean(tf.square(predicted - y), axis=1), 5)
    return tf.reduce_mean(worst.values)


def of_many(model, x, y, predicted):
    """Divides by degrees of freedom, which three samples do not have."""
    return tf.reduce_sum(tf.square(predicted - y)) / tf.cast(tf.shape(y)[0] - 3, y.dtype)


def summed():
    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return tf.reduce_sum(tf.square(y - y_pred))

    inputs = keras.Input((6,))
    own = type("Summed", (keras.Model,), {"compute_loss": compute_loss})
    return own(inputs, keras.layers.Dense(3)(inputs))


SGD = keras.optimizers.SGD
MIXED = "gradients that train_step applies .* mix samples"


@pytest.mark.parametrize(
    ("build", "optimizer", "message"),
    [
        (losing(lambda _, x, y, predicted: contrastive(predicted, y)), SGD, MIXED),
        (variant(reduce=staticmethod(tf.reduce_sum)), SGD, "mix samples or add to a sum"),
        (lambda: Annealed(tf.reduce_sum), SGD, "mix samples or add to a sum"),
        (
            lambda: Annealed(lambda made: tf.reduce_mean(tf.square(made[:, None] - made))),
            SGD, "mix samples or add to a sum",
        ),
        (logging(lambda _, made: tf.math.reduce_std(made)), SGD, "returns as 'odd' mixes samples"),
        (logging(lambda loss, _: tf.minimum(loss, 1e6)), SGD, "returns as 'odd' mixes samples"),
        (
            logging(lambda _, made: tf.cast(tf.reduce_any(made > 1e6), "float64")),
            SGD, "returns as 'odd' mixes samples",
        ),
        (variant(logs=before_the_end), SGD, "returns as 'before' mixes samples"),
        (summed, SGD, r"writes 'loss/total.*reduce_mean of the samples \(in `compute_loss`"),
        (LargestSeen, SGD, "writes '.*largest.*' with what mixes samples.*reduce_mean"),
        (lambda: LargestSeen(1e6), SGD, "writes '.*largest.*' with what mixes samples"),
        (variant(logs=in_a_function), SGD, "writes '.*total.*' with what mixes samples"),
        (losing(of_hardest), SGD, "does not run with some samples .* needed 5.*one value for each"),
        (
            losing(lambda _, x, y, made: tf.reduce_mean(tf.abs(made - y) * np.ones((8, 1)))),
            SGD, "does not run with some samples .*shape",
        ),
        (losing(of_many), SGD, "are not finite for some samples .* by themselves"),
        (losing(of_nothing), SGD, "are zero for samples of the first batch"),
        (
            clipping(lambda gradients: tf.clip_by_global_norm(gradients, 1e6)[0]),
            SGD, r"not follow linearly .*L2Loss.*global_clipnorm",
        ),
        (
            clipping(lambda gradients: [tf.clip_by_value(g, -1e6, 1e6) for g in gradients]),
            SGD, r"not follow linearly .*Minimum.*clipvalue",
        ),
        (clipping(none_if_large), SGD, r"not follow linearly .*L2Loss"),
        (losing(free_bits), SGD, r"not follow linearly"),
        (losing(of_some), SGD, r"not follow linearly"),
        (CASES["sum"][0], lambda: SGD(loss_scale_factor=2.0**1023), "not finite"),
        (losing(with_numbers), SGD, r"TensorFlow's own generator .*SeedGenerator"),
        (variant(train_step=in_a_condition), SGD, "within a condition"),
        (Regression, lambda: tnt.DistributedOptimizer(SGD()), "is a tnt.DistributedOptimizer"),
    ],
)  # fmt: skip
def test_what_is_refused(build, optimizer, message):
    with pytest.raises(UnsupportedModelError, match=message):
        kinds(build(), optimizer(), rows=9)


class RareRows(Regression):
    def predict_step(self, data):
        predicted = self(data[0])
        return tf.where(tf.reduce_any(predicted > 1e6), 0.5 * predicted, predicted)


def test_predictions_that_samples_decide_together_are_refused():
    trace = traced(RareRows(), name="predict_step")
    with pytest.raises(UnsupportedModelError, match="from that sample alone"):
        found_kinds(trace, [tf.constant(X[:9]), tf.constant(Y[:9])], by_rows=True)
