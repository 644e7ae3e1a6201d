"""Added losses are sums or means, or refused by name; what losses and optimizers look at, too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.probes.compilation_probe import value_kinds
from tarantella_pp.runtime.probes.parts import MEAN, ROWS, SUM
from tarantella_pp.runtime.weights.optimizer_probe import check_division, treats_weights_apart
from tests.helpers.training import compiled, distance, sgd
from tests.zoo.models import SameShape, chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

X, Y = np.random.default_rng(3).normal(size=(2, 7, 5))
IDS = np.random.default_rng(4).integers(0, 7, size=(7, 5))


class Adds(SameShape):
    """Scales its input and adds losses of it; one more counts once its share is not zero."""

    def __init__(self, *functions, **kwargs):
        super().__init__(**kwargs)
        self.functions = functions
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")
        self.share = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        x = self.gain * x
        for function in self.functions:
            self.add_loss(function(x))
        self.add_loss(self.share * ops.sum(ops.square(x)))
        return x


def model_of(*inner, ids=False):
    keras.utils.set_random_seed(1)
    words = [layers.Embedding(7, 2), layers.Flatten()] if ids else []
    start = [*words, layers.Dense(5, activation="tanh")]
    end = layers.Dense(4, activity_regularizer="l2"), layers.Dense(5)
    return chain((5,), *start, *inner, *end, dtype="int32" if ids else None)


def total(x):
    return 0.01 * ops.sum(ops.square(x))


def average(x):
    return 0.1 * ops.mean(ops.abs(x))


def divergence(x):
    """Of a variational autoencoder, as in Keras' documentation."""
    return -0.05 * ops.sum(1 + x - ops.square(x) - ops.exp(x), axis=-1)


def hinge(x):
    """Zero for most samples, and for the first micro-batch all over."""
    return ops.sum(ops.relu(x[:, 0] - 0.55))


def outcome(model, x=X):
    if not model.compiled:
        model.compile(sgd(), "mse", run_eagerly=not isinstance(model, PipelineModel))
    found = [model.train_on_batch(x, Y) for _ in range(2)]
    weights = model.get_weights()
    return [*found, *weights, model.evaluate(x, Y, batch_size=7, verbose=0)]


@pytest.mark.slow
def test_sums_and_means_are_told_apart_and_are_exact():
    """Also some that are zero at first, for these samples or for all of them."""
    found = []
    nothing = lambda x: 0.0 * ops.sum(ops.square(x)) + keras.regularizers.L2(0.0)(x)  # noqa: E731
    for wrap in (lambda model: model, lambda m: PipelineModel(m, 2, num_micro_batches=3)):
        rare = lambda x: ops.sum(ops.relu(x[:, 0] - 20.0))  # noqa: E731
        first, second = Adds(rare, average, nothing, total), Adds(divergence, hinge, average)
        model = wrap(model_of(first, second))
        found.append(outcome(model))
        for layer in (first, second):
            layer.share.assign(0.1)
        found[-1] += outcome(model)
    assert distance(*found) < 1e-10


def test_so_they_are_where_nothing_but_integers_goes_in():
    plain = outcome(model_of(Adds(total, average), ids=True), IDS)
    model = model_of(Adds(total, average), ids=True)
    piped = PipelineModel(model, 1, num_micro_batches=7)
    assert distance(plain, outcome(piped, IDS)) < 1e-10


@pytest.mark.slow
def test_so_they_are_behind_random_layers():
    """Of the same masks for each number of micro-batches, as only the first rows are looked at."""
    found = []
    for function in (total, lambda x: 7 * ops.mean(ops.sum(0.01 * ops.square(x), -1))):
        model = model_of(layers.Dropout(0.4, seed=2), Adds(function))
        piped = compiled(PipelineModel(model, 2, num_micro_batches=7), sgd(), "mse")
        found.append([piped.train_on_batch(X, Y), *piped.get_weights()])
    assert distance(*found) < 1e-10


MIXED = {
    "of means": lambda x: ops.sum(ops.square(ops.mean(x, axis=0))),
    "later": lambda x: ops.maximum(ops.sum(ops.square(x)), 1e-6),
    "of some": lambda x: ops.mean(x[x < 1e6]),
    "never seen": lambda x: ops.sum(ops.cast(ops.isnan(x), x.dtype)),
    "gradient alone": lambda x: ops.sum(ops.mean(x) * (x - ops.stop_gradient(x))),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_are_neither_are_refused_by_name(name):
    model = PipelineModel(model_of(Adds(average, MIXED[name], name="odd")), 1, num_micro_batches=3)
    model.compile(sgd(), "mse")
    before = model.get_weights()
    with pytest.raises(UnsupportedModelError, match=r"'odd' adds a loss.*num_micro_batches=1"):
        model.train_on_batch(X, Y)
    assert distance(before, model.get_weights()) == 0


class Counting(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(y_true - y_pred, -1) * (y_true.shape[0] or 1)


def test_losses_are_tried_with_all_their_options_and_with_a_known_number_of_samples():
    losses = [keras.losses.CosineSimilarity(axis=axis) for axis in (-1, 0)]
    assert losses[0].get_config() == losses[1].get_config()
    along, across = (value_kinds(loss, (None, 3)) for loss in losses)
    assert ROWS in (along or ())
    assert not across  # it looks at several samples
    assert value_kinds(Counting(), (None, 3)) == frozenset()


class Given(keras.losses.Loss):
    def __init__(self, function):
        super().__init__()
        self.call = function


@tf.custom_gradient
def with_unit_gradient(x):
    return tf.identity(x), lambda upstream: upstream / tf.norm(upstream)


def of_class_7(y, p):
    return tf.where(y == 7.0, p, 0.0)


@pytest.mark.parametrize(
    ("kinds", "loss"),
    [
        ({MEAN}, lambda y, p: ops.mean(ops.square(y - p)) + ops.mean(of_class_7(y, p))),
        ({MEAN}, lambda y, p: ops.sum(ops.square(y - p)) / ops.cast(ops.shape(p)[0], "float64")),
        ({SUM}, lambda y, p: ops.sum(ops.square(y - p)[:, 1:], axis=(0, 1))),
        ({ROWS}, lambda y, p: keras.losses.sparse_categorical_crossentropy(y[..., 0], p)),
        # which may be either, or nothing
        ({MEAN, SUM}, lambda y, p: ops.sum(of_class_7(y, p))),
        ({MEAN, SUM}, lambda y, p: ops.mean(ops.square(y - p)) + ops.sum(of_class_7(y, p))),
        (set(), lambda y, p: ops.square(y - with_unit_gradient(p))),
        (set(), lambda y, p: p + of_class_7(y, ops.flip(p, axis=0))),
        (set(), lambda y, p: p + of_class_7(y, p[:1])),
        (set(), lambda y, p: p + of_class_7(y, ops.mean(p[None] - p[:, None], axis=1))),
    ],
)
def test_what_losses_do_with_other_targets_or_to_gradients_only_is_found(kinds, loss):
    assert value_kinds(Given(loss), (None, 3)) == kinds


SAID = {"learning_rate": 0.1, "use_ema": False}


class Halved(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


class Normed(keras.optimizers.SGD):
    """Divides all gradients by their common norm."""

    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars, strict=True)
        norm = ops.sqrt(sum(ops.sum(g**2) for g in grads))
        return super().apply_gradients(zip([g / norm for g in grads], variables, strict=True))


class Clipped(keras.optimizers.Adam):
    """Clips all gradients by their common norm, which few have."""

    most = 1e4

    def apply(self, grads, trainable_variables=None):
        most, norm = self.most, ops.sqrt(sum(ops.sum(g**2) for g in grads))
        grads = [g * most / ops.maximum(norm, most) for g in grads]
        return super().apply(grads, trainable_variables)


class Tamed(Clipped):
    most = 0.1


class Skipping(keras.optimizers.Adam):
    """Skips what has a NaN."""

    def apply(self, grads, trainable_variables=None):
        finite = ops.all(ops.stack([ops.all(ops.isfinite(g)) for g in grads]))
        grads = [ops.where(finite, g, ops.zeros_like(g)) for g in grads]
        return super().apply(grads, trainable_variables)


class Branching(keras.optimizers.SGD):
    """Looks at the step in a branch for each weight; says little of how it was made."""

    get_config = staticmethod(lambda: SAID)

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cond(self.iterations > 3, lambda: self.learning_rate, lambda: 1.0)
        super().update_step(gradient, variable, rate)


class ByName(keras.optimizers.SGD):
    """Takes the gradients of layers of a kind together."""

    def apply(self, grads, trainable_variables=None):
        pairs = zip(grads, trainable_variables, strict=True)
        norm = sum((ops.sum(g**2) for g, v in pairs if "dense" in v.path), 1.0)
        return super().apply([g / norm for g in grads], trainable_variables)


class Later(keras.optimizers.SGD):
    """Takes all gradients together after some steps."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.where(self.iterations < 9, 1.0, sum(ops.sum(g**2) for g in grads))
        return super().apply([g / norm for g in grads], trainable_variables)


class Centred(keras.optimizers.SGD):
    """Changes gradients before they are clipped."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([g - ops.mean(g) for g in grads], trainable_variables)


class Unconfigured(keras.optimizers.SGD):
    def __init__(self, needed):
        super().__init__(0.1 * needed)


def test_optimizers_that_override_what_fit_calls_train_as_in_plain_keras():
    trained = []
    for model in (model_of(), PipelineModel(model_of(), num_stages=2)):
        for optimizer in (Normed(0.1), Tamed(0.1), Unconfigured(0.5)):
            model.compile(optimizer, "mse", run_eagerly=not trained)
            model.fit(X, Y, epochs=2, verbose=0)
        trained.append(model.get_weights())
    assert distance(*trained) < 1e-10


def test_those_that_treat_each_weight_by_itself_may_train_and_others_are_refused_by_name():
    weights = model_of().trainable_variables
    kinds = [keras.optimizers.Adam, keras.optimizers.Adafactor, keras.optimizers.Lamb, Halved]
    averaged = Halved(use_ema=True, ema_overwrite_frequency=2)
    clipped = Halved(global_clipnorm=0.1, gradient_accumulation_steps=2)
    own = [averaged, clipped, Centred(), Branching(0.1, global_clipnorm=0.1)]
    for optimizer in [None, *own, *(kind() for kind in kinds)]:
        check_division(optimizer, [], 2)
        assert optimizer is None or treats_weights_apart(optimizer, weights)
        assert optimizer is None or not optimizer.built
    assert SAID == {"learning_rate": 0.1, "use_ema": False}
    assert not treats_weights_apart(Centred(global_clipnorm=0.1), weights)
    for kind in (Normed, Clipped, Skipping, ByName, Later):
        name = f"{kind.__name__} looks at several weights.*2 ranks"
        with pytest.raises(ConfigurationError, match=name):
            check_division(kind(0.1), weights, 2)
    used = Unconfigured(1.0)
    check_division(used, [], 2)  # copied as it is
    used.build(weights)
    with pytest.raises(ConfigurationError, match=r"Unconfigured cannot be tried.*get_config"):
        check_division(used, [], 2)
