"""What fails on one rank in a later step than the first: all ranks learn of it at once."""

from __future__ import annotations

import time

import keras
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, distance, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.slow]

QUIET = {"batch_size": 4, "shuffle": False, "verbose": 0}
SHAPES = {
    "stages": {"num_stages": 2, "num_micro_batches": 2},
    "replicas": {"num_stages": 1, "num_replicas": 2, "num_micro_batches": 1},
}
SLEEP = 6.0


def dislikes_three(y_true, y_pred):
    """Fails when it is traced for a batch of three."""
    if y_pred.shape[0] == 3:
        raise BufferError("three of them")
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def dislikes_large(y_true, y_pred):
    """Fails when it meets a large target."""
    limit = tf.constant(99.0, y_true.dtype)
    with tf.control_dependencies([tf.debugging.assert_less(y_true, limit, "a bad apple")]):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def made(shape, loss):
    keras.utils.set_random_seed(1)
    model = mlp() if shape is None else tnt.PipelineModel(mlp(), **shape)
    model.compile(sgd(), loss, run_eagerly=shape is None)
    return model


def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def trained(model):
    history = model.fit(X[:8], Y[:8], epochs=2, **QUIET).history
    return [history, [w.tolist() for w in model.get_weights()]]


def later_batches():
    """Batches of other shapes than the first, whose loss cannot be traced."""
    use_float64()
    found = {}
    for name, shape in SHAPES.items():
        model = made(shape, dislikes_three)
        said = [
            failure(model.fit, X[:7], Y[:7], **QUIET),
            failure(model.evaluate, X[:7], Y[:7], batch_size=4, verbose=0),
        ]
        found[f"{name}, loss"] = [said, trained(model)]
        model = made(shape, "mse")
        said = [failure(model.fit, X, Y[:, None], **QUIET)]
        found[f"{name}, targets"] = [said, trained(model)]
    model = made(SHAPES["stages"], dislikes_large)
    bad = Y.copy()
    bad[9] = 100.0
    model.fit(X[:4], Y[:4], **QUIET)  # so that all is compiled
    start = time.monotonic()
    said = failure(model.fit, X, bad, **QUIET)
    seconds = time.monotonic() - start
    if tnt.get_rank() == 1:
        time.sleep(SLEEP)
    return found, [said, seconds, failure(model.fit, X, Y, **QUIET)]


def trained_in_keras(steps):
    model = made(None, "mse")
    for _ in range(steps):
        model.train_on_batch(X[:4], Y[:4])
    return trained(model)


def test_all_ranks_learn_what_fails_in_a_later_step():
    run = mpi_run(2, later_batches, timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    (first, mine), (last, theirs) = run.results
    for name in SHAPES:
        for kind, own, text, steps in (
            ("loss", "BufferError", "three of them", 1),
            ("targets", "UnsupportedModelError", "Reshape the targets", 0),
        ):
            said, after = last[f"{name}, {kind}"]
            told, same = first[f"{name}, {kind}"]
            assert all(error == own and text in message for error, message in said)
            assert all(error in (own, "ConfigurationError") for error, _ in told)
            assert all(text in message for _, message in told)
            assert after == same
            assert distance(trained_in_keras(steps), after) < 1e-10
    assert theirs[0][0] == "InvalidArgumentError"
    assert "a bad apple" in mine[0][1]
    assert "on rank 1" in mine[0][1]
    assert mine[1] < SLEEP / 2
    assert mine[2] == theirs[2]
    assert "a bad apple" in mine[2][1]
