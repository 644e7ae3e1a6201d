"""Scaled losses: one process, stages and replicas skip the same steps, at the same scale."""

import functools

import keras
import pytest
from keras import layers, ops

from tests.helpers import training
from tests.helpers.mpi import mpi_run
from tests.helpers.training import Case, X, Y, distance, fitted, in_precision, make, regression
from tests.zoo.models import chain, mlp

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

ROWS, BATCH, ZERO = 12, 4, 6
"""Three batches; a sample of the second one, in the share of the second of two replicas."""


def kinked():
    """A sample of zeros makes gradients NaN in the first stage, and there only."""
    first = layers.Dense(8, use_bias=False, kernel_regularizer="l2")
    kink = layers.Lambda(lambda h: ops.sqrt(ops.square(h)))
    last = layers.Dense(3, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2")
    return chain((6,), first, kink, last, layers.Activation("softplus"))


DATA = X.copy()
DATA[ZERO] = 0


def scaled(inner, initial_scale=2.0**15):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale, dynamic_growth_steps=2)


SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "momentum": lambda: scaled(SGD(0.05, momentum=0.9), initial_scale=3.0),
    "clipped": lambda: scaled(keras.optimizers.Adam(0.05, global_clipnorm=0.05)),
    "accumulating": lambda: scaled(SGD(0.05, gradient_accumulation_steps=2, global_clipnorm=0.05)),
}


def case_of(name):
    how = regression(optimizer=OPTIMIZERS[name])
    return Case(kinked, DATA[:ROWS], Y[:ROWS], how, batch=BATCH)


def books(model):
    """What decides on the steps to come."""
    optimizer = model.optimizer
    found = optimizer.iterations, optimizer.dynamic_scale, optimizer.step_counter
    return list(map(float, found))


@functools.cache
def expected(name):
    model = make(case_of(name))
    return fitted(model, case_of(name)), books(model)


def check(name, outcome, counted):
    in_keras, told = expected(name)
    assert distance(in_keras, outcome) < training.ROUNDING, name
    assert counted == told, name
    assert told[0] == (2 if name == "accumulating" else 4), name  # of six, two are skipped


SHARDED = {"num_stages": 2, "shard_optimizer": True}
TRIALS = {
    "momentum": {"num_stages": 4},  # of which the last trains nothing
    "clipped": SHARDED,
    "accumulating": SHARDED,
}


def train():
    """Trains on this rank."""
    training.use_float64()
    found = []
    for name, shape in TRIALS.items():
        model = make(case_of(name), num_micro_batches=2, **shape)
        found.append([fitted(model, training.data_of_rank(case_of(name))), books(model)])
    return found


@pytest.mark.mpi
@pytest.mark.slow
def test_all_ranks_make_the_same_steps():
    first, *others = mpi_run(4, train, timeout=500).check().results
    assert all(result == first for result in others)
    for name, (outcome, counted) in zip(TRIALS, first, strict=True):
        check(name, outcome, counted)


@pytest.mark.slow
def test_float16_as_in_keras():
    """`compile` scales the loss by itself; with one micro-batch a perceptron is that of Keras."""
    data = X.astype("float32"), Y.astype("float32")
    case = training.evenly(Case(mlp, *data, regression(optimizer=lambda: SGD(0.05, momentum=0.9))))
    with in_precision("float32", "mixed_float16"):
        keras.utils.set_random_seed(1)
        plain = training.compiled(mlp(), **case.compiled())
        outcome = fitted(plain, case)
        for micro_batches, limit in ((1, 1e-6), (2, 1e-2)):
            model = make(case, num_stages=2, num_micro_batches=micro_batches)
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert distance(outcome, fitted(model, case)) < limit
            assert books(model) == books(plain)
            assert {v.dtype for v in model.trainable_variables} == {"float32"}
            assert model.predict(data[0], verbose=0).dtype == "float16"


def test_the_policy_is_that_of_the_wrapped_model():
    with in_precision("float64", "mixed_float16"):
        plain = mlp()
    model = make(Case(lambda: plain, X, Y, regression()), num_stages=1)
    assert model.dtype_policy.name == "mixed_float16"
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert isinstance(model.optimizer, keras.optimizers.SGD)
