"""Callbacks on several ranks: what one rank alone decides, and files that are written once."""

from __future__ import annotations

import contextlib

import keras
import pytest

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, distance, refused, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

ROUNDING = 1e-10
QUIET = {"batch_size": 4, "shuffle": False, "verbose": 0}  # six steps an epoch


def compiled(model, **options):
    model.compile(sgd(), "mse", metrics=["mae"], **options)
    return model


def plain(**options):
    keras.utils.set_random_seed(1)
    return compiled(mlp(), run_eagerly=True, **options)


def pipeline(**options):
    keras.utils.set_random_seed(1)
    return compiled(tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2), **options)


class Stop(keras.callbacks.Callback):
    """Stops on some ranks: training at a batch or an epoch, evaluation or prediction at a batch."""

    def __init__(self, ranks, train=None, epoch=None, test=None, predict=None):
        super().__init__()
        self.mine = tnt.get_rank() in ranks
        self.at = {"train": train, "epoch": epoch, "test": test, "predict": predict}
        self.ended = {"train": [], "epoch": [], "test": [], "predict": []}

    def _end(self, what, number, flag):
        self.ended[what].append(number)
        if self.mine and number == self.at[what]:
            setattr(self.model, flag, True)

    def on_train_batch_end(self, batch, logs=None):
        self._end("train", batch, "stop_training")

    def on_epoch_end(self, epoch, logs=None):
        self._end("epoch", epoch, "stop_training")

    def on_test_batch_end(self, batch, logs=None):
        self._end("test", batch, "stop_evaluating")

    def on_predict_batch_end(self, batch, logs=None):
        self._end("predict", batch, "stop_predicting")


class Fails(keras.callbacks.Callback):
    """Fails on all ranks, at a batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise RuntimeError


STOPS = {
    "the first rank, a step later": ((0,), {"train": 2}, {}, 4),
    "all ranks, at once": ((0, 1), {"train": 2}, {}, 3),
    "the last rank, a step later": ((1,), {"train": 2}, {}, 4),
    "the last rank, in the last step": ((1,), {"train": 5}, {}, 6),
    "the last rank, before validation": ((1,), {"train": 5}, {"validation_data": (X, Y)}, 6),
    "the last rank, in validation": ((1,), {"test": 1}, {"validation_data": (X, Y)}, 12),
    "the last rank, at the end of an epoch": ((1,), {"epoch": 0}, {}, 6),
    "nobody": ((), {"train": 2}, {}, 12),
}


def stop():
    """Trains, evaluates and predicts; some ranks want to stop."""
    use_float64()
    found, model = {}, pipeline()
    start = model.get_weights()
    for name, (ranks, at, options, _) in STOPS.items():
        compiled(model).set_weights(start)  # its stages need not be traced again
        callback = Stop(ranks, **at)
        model.fit(X, Y, epochs=2, callbacks=[callback], **options, **QUIET)
        weights = [w.tolist() for w in model.get_weights()]
        found[name] = [int(model.optimizer.iterations), callback.ended, weights]
    model, callback = pipeline(steps_per_execution=2), Stop((1,), train=1)
    model.fit(X, Y, epochs=2, callbacks=[callback], **QUIET)
    found["two at a time"] = callback.ended["train"]
    model, again = pipeline(), Stop((1,), train=2)
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            model.fit(X, Y, callbacks=[Fails()], **QUIET)
        model.fit(X, Y, validation_data=(X, Y), callbacks=[again], **QUIET)
    found["after errors"] = [again.ended["train"], int(model.optimizer.iterations)]
    model, evaluation = pipeline(), Stop((1,), test=2, predict=2)
    model.evaluate(X, Y, batch_size=4, verbose=0, callbacks=[evaluation])
    model.predict(X, batch_size=4, verbose=0, callbacks=evaluation)
    found["evaluation"] = evaluation.ended
    return found


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step():
    run = mpi_run(2, stop, timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    assert run.results[0] == run.results[1]
    found = run.results[0]
    for name, (_, _, _, steps) in STOPS.items():
        iterations, ended, weights = found[name]
        assert iterations == steps, name
        assert ended["train"] == [step % 6 for step in range(steps)], name
        model = plain()
        for step in range(steps):
            rows = slice(step % 6 * 4, (step % 6 + 1) * 4)
            model.train_on_batch(X[rows], Y[rows])
        assert distance([w.tolist() for w in model.get_weights()], weights, "weights") < ROUNDING
    assert found["the last rank, in validation"][1]["test"] == [0, 1, 2] * 2
    assert found["two at a time"] == [1, 3]
    assert found["after errors"] == [[0, 1, 2, 3] * 2, 2 * (3 + 4)]
    assert found["evaluation"]["test"] == [0, 1, 2, 3]
    assert found["evaluation"]["predict"] == [0, 1, 2, 3]


class Rate(keras.callbacks.Callback):
    """Changes the learning rate on one rank."""

    def __init__(self, hook, rank=1):
        super().__init__()
        if tnt.get_rank() == rank:
            setattr(self, hook, self._change)

    def _change(self, *_, **__):
        self.model.optimizer.learning_rate = 0.125


def change_rates():
    """Learning rates that differ are refused; equal ones, and schedules, train."""
    use_float64()
    texts, model = [], pipeline()
    start = model.get_weights()
    for hook in ("on_train_begin", "on_train_batch_end", "on_epoch_end"):
        for rank in (0, 1):
            compiled(model)
            callback = Rate(hook, rank)
            texts.append(refused(lambda: model.fit(X, Y, callbacks=[callback], **QUIET)))  # noqa: B023
    compiled(model).set_weights(start)
    if tnt.get_rank():
        model.optimizer.learning_rate = 0.125
    texts.append(refused(lambda: model.fit(X, Y, **QUIET)))
    texts.append(refused(lambda: model.train_on_batch(X, Y)))
    model.optimizer.learning_rate = 0.05
    history = model.fit(X, Y, epochs=2, **QUIET).history
    return texts, history


@pytest.mark.slow
def test_learning_rates_that_differ_are_refused():
    run = mpi_run(2, change_rates, timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    assert run.results[0] == run.results[1]
    texts, history = run.results[0]
    for i, text in enumerate(texts[:6]):
        first, second = (0.125, 0.05) if i % 2 == 0 else (0.05, 0.125)
        message = f"learning_rate={first} on rank 0, learning_rate={second} on rank 1"
        assert message in text, (i, text)
    assert "fit(learning_rate=0.05)" in texts[6]
    assert "train_on_batch(learning_rate=0.125)" in texts[7]
    assert distance(plain().fit(X, Y, epochs=2, **QUIET).history, history) < ROUNDING
