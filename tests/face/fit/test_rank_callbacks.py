"""What one rank alone decides, or fails in, in a callback or in a step: all ranks know of it."""

import contextlib
import time

import keras
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers import training
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import begin_again, distance, refused, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

ROUNDING = 1e-10
X, Y = training.X[:12], training.Y[:12]
QUIET = {"batch_size": 2, "shuffle": False, "verbose": 0}  # six steps an epoch, of one size
SLEEP = 6.0
RATE = 0.05  # of `sgd()`


def compiled(model, **options):
    model.compile(sgd(), "mse", metrics=["mae"], **options)
    return model


def plain():
    keras.utils.set_random_seed(1)
    return compiled(mlp(), run_eagerly=True)


class Stop(keras.callbacks.Callback):
    """Stops on some ranks: training at a batch or an epoch, evaluation or prediction at a batch."""

    def __init__(self, ranks, **at):
        super().__init__()
        self.at = at if tnt.get_rank() in ranks else {}
        self.ended = {"train": [], "epoch": [], "test": [], "predict": []}

    def _end(self, what, number, flag):
        self.ended[what].append(number)
        if number == self.at.get(what):
            setattr(self.model, flag, True)

    def on_train_batch_end(self, batch, logs=None):
        self._end("train", batch, "stop_training")

    def on_epoch_end(self, epoch, logs=None):
        self._end("epoch", epoch, "stop_training")

    def on_test_batch_end(self, batch, logs=None):
        self._end("test", batch, "stop_evaluating")

    def on_predict_batch_end(self, batch, logs=None):
        self._end("predict", batch, "stop_predicting")


STOPS = {
    "the first rank, a step later": ((0,), {"train": 2}, {}, 4),
    "all ranks, at once": ((0, 1), {"train": 2}, {}, 3),
    "the last rank, in the last step": ((1,), {"train": 5}, {}, 6),
    "the last rank, before validation": ((1,), {"train": 5}, {"validation_data": (X, Y)}, 6),
    "the last rank, in validation": ((1,), {"test": 1}, {"validation_data": (X, Y)}, 12),
    "the last rank, at the end of an epoch": ((1,), {"epoch": 0}, {}, 6),
}


def stop(model, start):
    """Trains, evaluates and predicts; some ranks want to stop."""
    found = {}
    for name, (ranks, at, options, _) in STOPS.items():
        begin_again(model, start)
        callback = Stop(ranks, **at)
        model.fit(X, Y, epochs=2, callbacks=[callback], **options, **QUIET)
        weights = [w.tolist() for w in model.get_weights()]
        found[name] = [int(model.optimizer.iterations), callback.ended, weights]
    begin_again(model, start)

    def fail(batch, logs):
        if batch == 2:
            raise RuntimeError

    for again in (Stop((1,), train=2), Stop((1,), train=2)):
        with contextlib.suppress(RuntimeError):  # on all ranks
            fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
            model.fit(X, Y, callbacks=[fails], **QUIET)
        model.fit(X, Y, validation_data=(X, Y), callbacks=[again], **QUIET)
    found["after errors"] = [again.ended["train"], int(model.optimizer.iterations)]
    evaluation = Stop((1,), test=2, predict=2)
    held = keras.callbacks.CallbackList([evaluation], add_history=True, model=model)
    model.evaluate(X, Y, batch_size=2, verbose=0, callbacks=held)
    model.predict(X, batch_size=2, verbose=0, callbacks=evaluation)
    found["evaluation"] = evaluation.ended
    compiled(model, steps_per_execution=2)
    model.fit(X, Y, epochs=2, callbacks=[callback := Stop((1,), train=1)], **QUIET)
    found["two at a time"] = callback.ended["train"]
    return found


def check_stops(found):
    model = plain()
    expected = [model.get_weights()]
    for step in range(12):
        rows = slice(step % 6 * 2, (step % 6 + 1) * 2)
        model.train_on_batch(X[rows], Y[rows])
        expected.append(model.get_weights())
    for name, (_, _, _, steps) in STOPS.items():
        iterations, ended, weights = found[name]
        assert iterations == steps, name
        assert ended["train"] == [step % 6 for step in range(steps)], name
        assert distance(expected[steps], weights, "weights") < ROUNDING
    assert found["the last rank, in validation"][1]["test"] == [0, 1, 2] * 2
    assert found["two at a time"] == [1, 3]
    assert found["after errors"] == [[0, 1, 2, 3], 2 * (3 + 4)]
    assert found["evaluation"]["test"] == [0, 1, 2, 3]
    assert found["evaluation"]["predict"] == [0, 1, 2, 3]


HOOKS = {"on_train_begin": 0, "on_train_batch_end": 1, "on_epoch_end": 0}
"""Where learning rates change, and on which rank."""


def change_rates(model, start):
    """Learning rates that differ are refused; equal ones train."""

    def change(*_, **__):
        model.optimizer.learning_rate = 0.125

    texts = []
    for hook, rank in HOOKS.items():
        model.optimizer.learning_rate = RATE
        changing = {hook: change} if tnt.get_rank() == rank else {}
        fit = {"callbacks": [keras.callbacks.LambdaCallback(**changing)], **QUIET}
        texts.append(refused(lambda: model.fit(X, Y, **fit)))  # noqa: B023
    begin_again(model, start).optimizer.learning_rate = RATE
    if tnt.get_rank():
        model.optimizer.learning_rate = 0.125
    texts.append(refused(lambda: model.fit(X, Y, **QUIET)))
    texts.append(refused(lambda: model.train_on_batch(X, Y)))
    model.optimizer.learning_rate = RATE
    return texts, model.fit(X, Y, epochs=2, **QUIET).history


def check_rates(texts, history):
    for rank, text in zip(HOOKS.values(), texts, strict=False):
        first, second = (RATE, 0.125) if rank else (0.125, RATE)
        assert f"learning_rate={first} on rank 0, learning_rate={second} on rank 1" in text
    assert "fit(learning_rate=0.05)" in texts[-2]
    assert "train_on_batch(learning_rate=0.125)" in texts[-1]
    assert distance(plain().fit(X, Y, epochs=2, **QUIET).history, history) < ROUNDING


def dislikes_large(y_true, y_pred):
    """Fails when it meets a large target."""
    limit = tf.constant(99.0, y_true.dtype)
    with tf.control_dependencies([tf.debugging.assert_less(y_true, limit, "a bad apple")]):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def fail_in_a_later_step(model):
    """The loss fails on the last rank; then comes a call after it."""
    model.compile(sgd(), dislikes_large)
    bad = Y.copy()
    bad[9] = 100.0
    model.fit(X[:2], Y[:2], **QUIET)  # so that all is compiled
    start = time.monotonic()
    said = error_of(lambda: model.fit(X, bad, **QUIET))
    seconds = time.monotonic() - start
    if tnt.get_rank() == 1:
        time.sleep(SLEEP)
    return said, seconds, error_of(lambda: model.fit(X, Y, **QUIET))


def check_failures(mine, theirs):
    assert theirs[0].startswith("InvalidArgumentError")
    assert "a bad apple" in mine[0]
    assert "on rank 1" in mine[0]
    assert mine[1] < SLEEP / 2
    assert mine[2] == theirs[2]
    assert "a bad apple" in mine[2]


def everything():
    """All of it with one pipeline, whose stages are traced once."""
    use_float64()
    keras.utils.set_random_seed(1)
    model = compiled(tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2))
    start = model.get_weights()
    rates = change_rates(model, start)
    return stop(model, start), rates, fail_in_a_later_step(model)


@pytest.mark.slow
def test_ranks_stop_after_the_same_step_and_refuse_rates_that_differ_and_fail_together():
    run = mpi_run(2, everything, timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    (stops, rates, mine), (others, other_rates, theirs) = run.results
    assert (stops, rates) == (others, other_rates)
    check_stops(stops)
    check_rates(*rates)
    check_failures(mine, theirs)
