"""The loss of a batch is the sum of what its micro-batches contribute, or is refused as such.

Those of Keras, with all reductions, weights and masks, are in `tests/exactness/losses.py`.
"""

import weakref

import keras
import numpy as np
import pytest
from keras import layers, losses

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.batch_step import BatchStep
from tests.helpers.training import compiled, distance, sgd
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]

RNG = np.random.default_rng(3)
ROWS = 7
IMAGES = RNG.normal(size=(ROWS, 4, 4, 2))
CLASSES = RNG.integers(0, 3, size=(ROWS, 4, 4))
PARTS = RNG.dirichlet(np.ones(3), size=(ROWS, 4, 4))


def segmentation():
    keras.utils.set_random_seed(1)
    first = layers.Conv2D(4, 3, padding="same", activation="tanh")
    return chain((4, 4, 2), first, layers.Conv2D(3, 1, activation="softplus"))


def trained(model, y, weight):
    found = [model.train_on_batch(IMAGES, y, weight, return_dict=True) for _ in range(2)]
    return [*found, *model.get_weights()]


@pytest.fixture(scope="module")
def models():
    made = segmentation(), segmentation()
    pipeline = PipelineModel(made[1], num_stages=2, num_micro_batches=3, schedule="1f1b")
    return made[0], pipeline, made[0].get_weights()


def test_gradients_of_the_loss_are_let_go_one_after_the_other(models, monkeypatch):
    _, pipeline, _ = models
    pipeline.compile("sgd", "mse")
    honest, made, alive = BatchStep.loss_gradients, [], []

    def noted(self, micro_batch):
        found = honest(self, micro_batch)
        alive.append(sum(one() is not None for one in made))
        made.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(BatchStep, "loss_gradients", noted)
    pipeline.train_on_batch(IMAGES, PARTS)
    assert len(made) == 3
    assert alive == [0, 0, 0]


def test_a_batch_with_nothing_but_ignored_targets_trains_nothing(models):
    _, pipeline, start = models
    pipeline.set_weights(start)
    pipeline.compile(sgd(), losses.SparseCategoricalCrossentropy(ignore_class=1))
    logs = pipeline.train_on_batch(IMAGES, np.ones_like(CLASSES), return_dict=True)
    assert logs["loss"] == 0
    assert distance(pipeline.get_weights(), start) == 0


@pytest.mark.parametrize("adding", ["kernel_regularizer", "activity_regularizer"])
def test_values_of_samples_are_not_added_to_other_losses(adding):
    x = RNG.normal(size=(ROWS, 5))
    stack = [keras.Input((5,)), layers.Dense(5, **{adding: "l2"}), layers.Dense(3)]
    model = PipelineModel(keras.Sequential(stack), num_stages=2, num_micro_batches=3)
    model.compile(sgd(), losses.MeanSquaredError(reduction="none"))
    start = model.get_weights()
    for use in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(ValueError, match="reduction=None"):
            use(x, x[:, :3])
    assert distance(start, model.get_weights()) == 0


def own_loss(y_true, y_pred):
    return keras.ops.square(keras.ops.mean(y_true - y_pred))


def of_some(y_true, y_pred):
    """Leaves one sample out, which made-up data do not have."""
    chosen = keras.ops.nonzero(y_true[:, 0, 0, 0] != PARTS[2, 0, 0, 0])[0]
    return keras.ops.take(keras.ops.mean((y_true - y_pred) ** 2, axis=(1, 2, 3)), chosen)


@pytest.mark.parametrize("own_loss", [own_loss, of_some])
def test_losses_that_couple_samples_say_what_that_costs(own_loss):
    with pytest.warns(UserWarning, match=r"'gpipe'.* 384 B for each sample"):
        PipelineModel(segmentation(), 2, num_micro_batches=3).compile(sgd(), own_loss)
    one = PipelineModel(segmentation(), 2, num_micro_batches=1, schedule="1f1b")  # as good as any
    one.compile(sgd(), own_loss)
    plain = compiled(segmentation(), sgd(), own_loss, run_eagerly=True)
    assert distance(trained(plain, PARTS, None), trained(one, PARTS, None)) < 1e-13


def test_targets_that_keras_spreads_over_other_samples_are_refused(models):
    _, pipeline, start = models
    pipeline.set_weights(start)
    pipeline.compile(sgd(), "mse")
    with pytest.raises(UnsupportedModelError, match="shape of the targets"):
        pipeline.train_on_batch(IMAGES, PARTS[:, None])
    assert distance(pipeline.get_weights(), start) == 0


class Weighted(losses.Loss):
    """A value for each pixel, of a class of the user's."""

    def call(self, y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred) * (1 + y_true), axis=-1)


OWN = {
    "each pixel": Weighted,
    "mean": lambda: lambda y, p: keras.ops.mean(keras.ops.abs(y - p)),
    "sum": lambda: lambda y, p: 0.1 * keras.ops.sum(keras.ops.square(y - p)),
}


@pytest.mark.parametrize("name", OWN)
def test_losses_of_the_users_own_are_tried_and_run_with_1f1b(models, name):
    plain, pipeline, start = models
    weight = RNG.uniform(0.2, 2, size=(ROWS, 4, 4) if name == "each pixel" else ROWS)
    found = []
    for model in (plain, pipeline):
        model.set_weights(start)
        model.compile(sgd(), OWN[name](), run_eagerly=model is plain)
        found.append(trained(model, PARTS, weight))
    assert distance(*found) < 1e-10


def late(y, p):
    """A mean over samples until errors are large."""
    error = keras.ops.mean(keras.ops.square(y - p), axis=(1, 2, 3))
    return error * keras.ops.minimum(1.0, 3.0 / keras.ops.max(error))


def noisy(y, p):
    return keras.ops.mean(keras.ops.square(y - p)) + keras.random.uniform(()) * 0


@pytest.mark.parametrize("loss", [late, noisy])
def test_what_looks_at_the_batch_with_other_numbers_only_is_found(models, loss):
    _, pipeline, _ = models
    with pytest.raises(ConfigurationError, match=f"loss '{loss.__name__}' looks at several"):
        pipeline.compile(sgd(), loss)
