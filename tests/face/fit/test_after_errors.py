"""What an error leaves behind in one process, where users train on: nothing."""

import contextlib
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
from tests.helpers.training import compiled_once, distance, floats, integers

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
PACKAGE = str(Path(tarantella_pp.__file__).parent)
IDS, TARGETS = integers(6, 5, seed=3), floats(24, seed=1)
BATCHES = [(IDS[i : i + 6], TARGETS[i : i + 6]) for i in (0, 6, 12)]
TORN = "while the optimizer updated the weights"


class BadAppleError(Exception):
    pass


def model_of_all_kinds():
    """Gradients that add up, that are sparse, and that are collected by their factors."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(6, 24)(ids))
    x = layers.LayerNormalization()(layers.Dense(24, activation="tanh")(x))
    x = layers.Dense(24, activation="elu", kernel_regularizer="l2")(x)
    return keras.Model(ids, layers.Add()([x, layers.Dense(24)(x)]))


def pipeline_of_all_kinds(**options):
    return compiled(PipelineModel(model_of_all_kinds(), 3, num_micro_batches=3, **options))


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    return model


@compiled_once
def split_pipeline():
    """One for most tests, whose schedule has all kinds of actions."""
    repeated = make_schedule("zb-h1", 3, 3).repeating({(1, 0), (1, 2), (2, 1)})
    return pipeline_of_all_kinds(schedule=Schedule.from_text(repeated.to_text()), recompute="all")


class Reference:
    """Plain Keras after each number of steps."""

    def __init__(self):
        self._model = compiled(model_of_all_kinds(), run_eagerly=True)
        self._weights, self._logs = [self._model.get_weights()], []

    def weights(self, steps):
        while len(self._weights) <= steps:
            batch = BATCHES[len(self._logs) % len(BATCHES)]
            self._logs.append(self._model.train_on_batch(*batch))
            self._weights.append(self._model.get_weights())
        return self._weights[steps]

    def logs(self, step):
        self.weights(step + 1)
        return self._logs[step]


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


def check(model, reference):
    step = int(model.optimizer.iterations)
    assert distance(model.get_weights(), reference.weights(step), "weights") < ROUNDING
    assert distance(train(model), reference.logs(step)) < ROUNDING


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
    reference, model = Reference(), split_pipeline()
    train(model)
    for number in np.linspace(1, count_calls(model), 13, dtype=int):
        step = int(model.optimizer.iterations)
        if attempt(model, number):
            model.optimizer.iterations.assign(step)
            model.set_weights(reference.weights(step))
        check(model, reference)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_at_any_call_of_the_first_step_leaves_whole_steps():
    reference = Reference()
    calls, model = count_calls(pipeline_of_all_kinds()), pipeline_of_all_kinds()
    if not attempt(model, 2 * calls // 3):
        check(model, reference)
        check(model, reference)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_ends_before_ctrl_c_does():
    reference, model = Reference(), split_pipeline()
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
        check(model, reference)
    assert done > 4


def test_an_error_in_the_update_is_told(monkeypatch):
    model = split_pipeline()
    train(model)
    update = model._engine._compilation.update
    monkeypatch.setattr(update, "_update", lambda *sums: fail())
    with pytest.raises(BadAppleError) as error:
        train(model)
    assert TORN in error.value.__notes__[0]


class FailsOnce(keras.callbacks.Callback):
    """Fails at one of the hooks, the first time."""

    def __init__(self, hook):
        super().__init__()
        self._failed = False
        setattr(self, hook, self._fail)

    def _fail(self, *_, **__):
        if not self._failed:
            self._failed = True
            fail()


@pytest.mark.parametrize(
    "hook", ["on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end"]
)
def test_a_callback_that_fails_takes_nothing_along(hook):
    model, plain = split_pipeline(), compiled(model_of_all_kinds(), run_eagerly=True)
    fit = {"batch_size": 6, "shuffle": False, "verbose": 0}
    fit["validation_data"] = IDS[6:12], TARGETS[6:12]
    with pytest.raises(BadAppleError):
        model.fit(IDS[:12], TARGETS[:12], callbacks=FailsOnce(hook), **fit)
    plain.set_weights(model.get_weights())
    told = [m.fit(IDS[:12], TARGETS[:12], **fit).history for m in (plain, model)]
    assert distance(*told) < ROUNDING
    assert distance(plain.get_weights(), model.get_weights(), "weights") < ROUNDING


def test_data_that_fail_take_nothing_along():
    reference, model = Reference(), split_pipeline()

    def batches():
        yield from BATCHES[:2]
        fail()

    with pytest.raises(Exception, match="BadAppleError"):
        model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert int(model.optimizer.iterations) == 2
    check(model, reference)


def test_a_step_that_ends_too_early_is_not_the_end_of_the_data():
    def loss(y_true, y_pred):
        return next(iter(()))

    inputs = keras.Input((4,))
    model = PipelineModel(keras.Model(inputs, layers.Dense(2)(layers.Dense(3)(inputs))), 2)
    model.compile("sgd", loss)
    with pytest.raises(RuntimeError, match="StopIteration"):
        model.fit(floats(4), floats(2, seed=1), verbose=0)
