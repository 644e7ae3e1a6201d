"""What an error leaves behind in one process, where users train on: nothing."""

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.schedule import Schedule, make_schedule
from tests.helpers.training import ROUNDING, begun, compiled_once, distance, floats, integers

pytestmark = pytest.mark.keras

PACKAGE = str(Path(tarantella_pp.__file__).parent)
IDS, TARGETS = integers(6, 5, seed=3), floats(24, seed=1)
BATCHES = [(IDS[i : i + 6], TARGETS[i : i + 6]) for i in (0, 6, 12)]
TORN = "while the optimizer updated the weights"


class BadAppleError(Exception):
    pass


def model_of_all_kinds():
    """Gradients that add up, that are sparse, and that are collected by their factors."""
    ids = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(6, 24)(ids))
    x = layers.LayerNormalization()(layers.Dense(24, activation="tanh")(x))
    x = layers.Dense(24, activation="elu", kernel_regularizer="l2")(x)
    return keras.Model(ids, layers.Add()([x, layers.Dense(24)(x)]))


def started(wrap=None):
    return begun(model_of_all_kinds, wrap, keras.optimizers.SGD(0.1), "mse", metrics=["mae"])


@compiled_once
def split_pipeline():
    """One for most tests, whose schedule has all kinds of actions."""
    repeated = make_schedule("zb-h1", 3, 3).repeating({(1, 0), (1, 2), (2, 1)})
    options = {"schedule": Schedule.from_text(repeated.to_text()), "recompute": "all"}
    return started(lambda model: PipelineModel(model, 3, num_micro_batches=3, **options))


@functools.cache
def plain():
    return started()


@functools.cache
def expected(step):
    """The weights of plain Keras before a step, and the logs of that."""
    if step:
        expected(step - 1)
    return plain().get_weights(), plain().train_on_batch(*BATCHES[step % len(BATCHES)])


@contextlib.contextmanager
def at_call(number, do):
    """Does something at the n-th call of a function of the package; yields how many there were."""
    calls = [0]

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[0] += 1
            if calls[0] == number:
                do()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def fail():
    raise BadAppleError


def train(model):
    step = int(model.optimizer.iterations)
    return model.train_on_batch(*BATCHES[step % len(BATCHES)])


def check(model):
    weights, logs = expected(int(model.optimizer.iterations))
    assert distance(model.get_weights(), weights, "weights") < ROUNDING
    assert distance(train(model), logs) < ROUNDING


def count_calls(model):
    with at_call(0, fail) as calls:
        train(model)
    return calls[0]


def attempt(model, number):
    """Trains until a call fails; returns whether that left the weights updated in part."""
    try:
        with at_call(number, fail):
            train(model)
    except BadAppleError as error:
        return TORN in "".join(getattr(error, "__notes__", []))
    return False  # it came while Python tidied up


@pytest.mark.slow
# What generators do when they are dropped fails unseen.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_at_any_call_of_a_step_leaves_whole_steps():
    model = split_pipeline()
    train(model)
    for number in np.linspace(1, count_calls(model), 13, dtype=int):
        step = int(model.optimizer.iterations)
        if attempt(model, number):
            model.optimizer.iterations.assign(step)
            model.set_weights(expected(step)[0])
        check(model)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_ends_before_ctrl_c_does():
    model = split_pipeline()
    train(model)
    done = 0
    for number in np.linspace(1, count_calls(model), 8, dtype=int):
        step = int(model.optimizer.iterations)
        with (
            contextlib.suppress(KeyboardInterrupt),
            at_call(number, lambda: os.kill(os.getpid(), signal.SIGINT)),
        ):
            train(model)
        done += int(model.optimizer.iterations) - step
        check(model)
    assert done > 4


def test_an_error_in_the_update_is_told(monkeypatch):
    model = split_pipeline()
    train(model)
    update = model._engine._compilation.update
    monkeypatch.setattr(update, "_update", lambda *sums: fail())
    with pytest.raises(BadAppleError) as error:
        train(model)
    assert TORN in error.value.__notes__[0]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end"]
)
def test_a_callback_that_fails_takes_nothing_along(hook):
    model, plain = split_pipeline(), started()
    fit = {"batch_size": 6, "shuffle": False, "verbose": 0}
    fit["validation_data"] = IDS[6:12], TARGETS[6:12]
    fails = keras.callbacks.LambdaCallback(**{hook: lambda *_, **__: fail()})
    with pytest.raises(BadAppleError):
        model.fit(IDS[:12], TARGETS[:12], callbacks=fails, **fit)
    plain.set_weights(model.get_weights())
    told = [m.fit(IDS[:12], TARGETS[:12], **fit).history for m in (plain, model)]
    assert distance(*told) < ROUNDING
    assert distance(plain.get_weights(), model.get_weights(), "weights") < ROUNDING


def test_a_first_step_that_ends_too_early_is_not_the_end_of_the_data_and_trains_nothing():
    fails = []

    def loss(y_true, y_pred):
        if fails:
            raise fails.pop()
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    plain = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model = PipelineModel(keras.models.clone_model(plain), 2)
    model.set_weights(plain.get_weights())
    plain.compile("sgd", loss, run_eagerly=True)
    model.compile("sgd", loss)
    fit, fails[:] = {"shuffle": False, "verbose": 0}, [StopIteration()]
    with pytest.raises(RuntimeError, match="StopIteration"):
        model.fit(floats(4), floats(2, seed=1), **fit)
    told = [each.fit(floats(4), floats(2, seed=1), **fit).history for each in (plain, model)]
    assert not fails
    assert distance(*told) < ROUNDING
