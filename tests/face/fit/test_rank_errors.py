"""What fails on one rank in a later step than the first: all ranks learn of it at once."""

from __future__ import annotations

import time

import keras
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.slow]

QUIET = {"batch_size": 4, "shuffle": False, "verbose": 0}
SLEEP = 6.0


def dislikes_large(y_true, y_pred):
    """Fails when it meets a large target."""
    limit = tf.constant(99.0, y_true.dtype)
    with tf.control_dependencies([tf.debugging.assert_less(y_true, limit, "a bad apple")]):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def bad_batch():
    """A batch whose loss fails on the last rank; then a call after it."""
    use_float64()
    model = tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2)
    model.compile(sgd(), dislikes_large)
    bad = Y.copy()
    bad[9] = 100.0
    model.fit(X[:4], Y[:4], **QUIET)  # so that all is compiled
    start = time.monotonic()
    said = failure(model.fit, X, bad, **QUIET)
    seconds = time.monotonic() - start
    if tnt.get_rank() == 1:
        time.sleep(SLEEP)
    return said, seconds, failure(model.fit, X, Y, **QUIET)


def test_all_ranks_learn_what_fails_in_a_later_step():
    run = mpi_run(2, bad_batch, timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    mine, theirs = run.results
    assert theirs[0][0] == "InvalidArgumentError"
    assert "a bad apple" in mine[0][1]
    assert "on rank 1" in mine[0][1]
    assert mine[1] < SLEEP / 2
    assert mine[2] == theirs[2]
    assert "a bad apple" in mine[2][1]
