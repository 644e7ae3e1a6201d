"""What one rank alone calls, decides or fails in, in a callback or in a step: all know of it."""

import contextlib
import re
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers import training
from tests.helpers.files import error_of, refused
from tests.helpers.mpi import mpi_run
from tests.helpers.training import ROUNDING, begin_again, distance, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

X, Y = training.X[:12], training.Y[:12]
QUIET = {"batch_size": 2, "shuffle": False, "verbose": 0}  # six steps an epoch, of one size
RATE = 0.05  # of `sgd()`


def started(wrap=None):
    return training.begun(mlp, wrap, sgd(), "mse", metrics=["mae"])


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
    model.compile(sgd(), "mse", metrics=["mae"], steps_per_execution=2)
    model.fit(X, Y, epochs=2, callbacks=[callback := Stop((1,), train=1)], **QUIET)
    found["two at a time"] = callback.ended["train"]
    return found


def check_stops(found):
    model = started()
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
    model.optimizer.iterations.assign(7 * tnt.get_rank())
    texts.append(refused(lambda: model.fit(X, Y, **QUIET)))
    model.optimizer.iterations.assign(0)
    model.trainable = not tnt.get_rank()
    texts.append(refused(lambda: model.compile("sgd", "mse")))
    model.trainable = True
    return texts, model.fit(X, Y, epochs=2, **QUIET).history


def check_rates(texts, history):
    for rank, text in zip(HOOKS.values(), texts, strict=False):
        first, second = (RATE, 0.125) if rank else (0.125, RATE)
        assert f"learning_rate={first} on rank 0, learning_rate={second} on rank 1" in text
    assert "fit(learning_rate=0.05)" in texts[-4]
    assert "train_on_batch(learning_rate=0.125)" in texts[-3]
    assert all(said in texts[-2] for said in ("iterations=0", "iterations=7", "same iter"))
    assert re.search("compile.trainable='[1-9].*compile.trainable='0 of", texts[-1])
    assert distance(started().fit(X, Y, epochs=2, **QUIET).history, history) < ROUNDING


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
        time.sleep(1.5)
    return said, seconds, error_of(lambda: model.fit(X, Y, **QUIET))


def check_failures(mine, theirs):
    assert theirs[0].startswith("InvalidArgumentError")
    assert "a bad apple" in mine[0]
    assert "on rank 1" in mine[0]
    assert mine[1] < 3
    assert mine[2] == theirs[2]
    assert "a bad apple" in mine[2]


def ends_badly():
    yield X[:2], Y[:2]
    yield X[2:4], Y[2:4]
    raise ValueError("a bad apple")


def make_calls_that_differ(model, folder):
    """Calls that ranks do not make alike; each is refused on all of them, and nothing changes."""
    master = tnt.is_master_rank()
    before = [w.tolist() for w in model.get_weights()]
    zeros = [w * 0.0 for w in model.get_weights()]

    def on_master(call, elsewhere=lambda: model.evaluate(X, Y, verbose=0)):
        return call if master else elsewhere

    def have_callbacks_of_ones_own():
        callbacks = [keras.callbacks.EarlyStopping("loss")] if master else []
        model.fit(X, Y, callbacks=callbacks, **QUIET)

    def compile_with_other_slots():
        plain = mlp()
        plain.compile("adam", "mse")
        plain.fit(X + tnt.get_rank(), Y, **QUIET)
        tnt.PipelineModel(plain, num_stages=2, num_micro_batches=2)

    calls = [
        on_master(lambda: model.save(f"{folder}/model.keras")),
        on_master(lambda: model.reset_metrics()),
        on_master(lambda: model.set_weights(zeros)),
        lambda: model.set_weights([w + float(master) for w in zeros]),
        lambda: model.compile(keras.optimizers.SGD(0.1 if master else 0.2), "mse"),
        have_callbacks_of_ones_own,
        lambda: (model.train_on_batch if master else model.test_on_batch)(X, Y),
        lambda: tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=3 if master else 2),
        on_master(lambda: tnt.barrier(), lambda: model.get_weights()),
        lambda: model.load_weights(f"{own}/w.weights.h5"),
        lambda: model.load_weights(f"{own}/{'w' if master else 'missing'}.weights.h5"),
        lambda: model.load_weights(f"{own}/w.weights.json"),
        compile_with_other_slots,
    ]
    own = Path(folder) / str(tnt.get_rank())
    own.mkdir()
    plain = mlp()
    plain.set_weights([w + tnt.get_rank() for w in plain.get_weights()])
    plain.save_weights(own / "w.weights.h5")
    plain.save_weights(own / "w.weights.json", max_shard_size=1e-3)
    found = [refused(call) for call in calls]
    assert "num_stages='two'" in refused(lambda: tnt.PipelineModel(mlp(), num_stages="two"))
    # That of the reader, or what it tells the others
    found.append(error_of(lambda: model.fit(ends_badly(), steps_per_epoch=4, verbose=0)))
    iterations = int(model.optimizer.iterations)
    model.set_weights([np.array(w) for w in before])
    after = [w.tolist() for w in model.get_weights()]
    history = model.fit(X, Y, epochs=2, **QUIET).history
    return found, before == after, iterations, history


def check_calls(first, second):
    for (*texts, data), *_ in (first, second):
        assert texts == first[0][:-1]
        assert "a bad apple" in data
    assert first[1:] == second[1:]
    (*texts, slots, _), unchanged, iterations, history = first
    assert "slots of optimizer adam differ between ranks" in slots
    assert iterations == 2
    for text, one, other in zip(
        texts,
        ("evaluate()", "evaluate()", "evaluate()", "set_weights(weights=",
         "compile(optimizer.learning_rate=0.2",
         "fit(callbacks=[])", "test_on_batch()", "PipelineModel(num_micro_batches=2)",
         "get_weights()", "load_weights(contents=", "load_weights(contents='FileNotFoundError'",
         "load_weights(contents="),
        ("save()", "reset_metrics()", "set_weights()", "set_weights(weights=",
         "compile(optimizer.learning_rate=0.1",
         "fit(callbacks=['EarlyStopping'])", "train_on_batch()",
         "PipelineModel(num_micro_batches=3)", "tnt.barrier()", *["load_weights(contents="] * 3),
        strict=True,
    ):  # fmt: skip
        place = r".* at \S*test_rank_callbacks\.py:\d+ on rank "
        assert re.search(re.escape(one) + place + "0; " + re.escape(other) + place + "1", text)
    assert unchanged
    assert history["loss"][1] < history["loss"][0]


def everything(folder):
    """All of it with one pipeline, whose stages are traced once."""
    use_float64()
    model = started(lambda plain: tnt.PipelineModel(plain, num_stages=2, num_micro_batches=2))
    start = model.get_weights()
    calls, rates = make_calls_that_differ(model, folder), change_rates(model, start)
    return calls, stop(model, start), rates, fail_in_a_later_step(model)


@pytest.mark.slow
def test_ranks_refuse_calls_and_rates_that_differ_stop_after_the_same_step_and_fail_together(
    tmp_path,
):
    run = mpi_run(2, everything, str(tmp_path), timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    (calls, stops, rates, mine), (other_calls, others, other_rates, theirs) = run.results
    assert (stops, rates) == (others, other_rates)
    check_calls(calls, other_calls)
    assert not (tmp_path / "model.keras").exists()
    check_stops(stops)
    check_rates(*rates)
    check_failures(mine, theirs)
