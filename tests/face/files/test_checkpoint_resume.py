"""In the middle of all kinds of data, among callbacks, on SIGTERM: a run goes on as if it had not
stopped. In one process; `test_checkpoints.py` has several ranks."""

import functools
import itertools
import os
import random
import signal
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError
from tests.face.files.test_checkpoints import At, Seen, stop
from tests.helpers.training import compiled, compiled_once, floats
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]

X, Y = floats(6, seed=1), floats(3, seed=2)
BATCHES = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 20, 5)]


def pipeline(optimizer, loss="mse"):
    plain = chain((6,), layers.Dense(8, "tanh"), layers.Dropout(0.2), layers.Dense(3))
    wrapped = tnt.PipelineModel(plain, num_stages=1, num_micro_batches=1)
    return compiled(wrapped, optimizer, loss, metrics=["mae"])


@compiled_once
def model(ema=False):
    """That of a script that starts."""
    return pipeline(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=ema, ema_momentum=0.8))


def run(directory, *callbacks, data=None, every="epoch", ema=False, **options):
    """History and weights of a run; without a directory, of one that is not stopped."""
    trained = model(ema=ema)
    own = [] if directory is None else [tnt.callbacks.Checkpoint(directory, every)]
    options = {"epochs": 3, "verbose": 0, **options}
    told = trained.fit(**(data or DATA["arrays"])(), callbacks=[*own, *callbacks], **options)
    return told.history, told.epoch, [w.tolist() for w in trained.get_weights()]


@functools.cache
def uninterrupted(kind="arrays", **options):
    """What comes of a run on data of a kind that is not stopped."""
    return run(None, data=DATA[kind], **options)


class Shuffled(keras.utils.PyDataset):
    """Draws another order of its samples, by itself, after each epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(X))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = self.order[5 * index : 5 * index + 5]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)  # noqa: NPY002


def dataset(batch_size=5):
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3)
    return {"x": batches.batch(batch_size)}


def noisy():
    noise = lambda x, y: (x + tf.random.normal((6,), dtype=x.dtype, seed=1), y)  # noqa: E731
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).map(noise).batch(5)}


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 5},
    "parts of a pass": lambda: {"x": X, "y": Y, "batch_size": 2, "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Shuffled()},
    "tf.data": dataset,
    "tf.data in parts of a pass": lambda: {**dataset(4), "steps_per_epoch": 3},
    "tf.data without an end": lambda: {"x": dataset()["x"].repeat(), "steps_per_epoch": 3},
    "tf.data of unknown length": lambda: {"x": dataset()["x"].unbatch().batch(7)},
    "tf.data with random numbers": noisy,
    "tf.data that caches an order": lambda: {"x": dataset(2)["x"].cache()},
    "generator": lambda: {"x": (batch for batch in itertools.cycle(BATCHES)), "steps_per_epoch": 3},
}


# After which steps runs are stopped; those of other data in the middle of an epoch.
STOPS = {
    "arrays": (5, 6),
    "tf.data": (5, 6),
    "tf.data in parts of a pass": (5,),  # the sixth step ends a pass
    "tf.data of unknown length": (4, 6),  # the fourth would be the last, which nobody knows yet
}


QUICK = ("arrays", "tf.data", "generator")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DATA]


@pytest.mark.parametrize("kind", KINDS)
def test_data_go_on_where_they_were(tmp_path, caplog, kind):
    for step in STOPS.get(kind, (6,)):
        run(tmp_path, At(step, stop), data=DATA[kind])
    assert run(tmp_path, data=DATA[kind]) == uninterrupted(kind)
    reads_again = kind == "generator" or kind.startswith(("tf.data", "PyDataset"))
    assert ("batches again to come back" in caplog.text) == reads_again


@pytest.mark.slow
def test_each_sample_is_seen_once_in_an_epoch_without_a_seed(tmp_path):
    x = 100.0 + np.arange(22.0)[:, None] * np.ones((1, 6))

    seen = []

    def loss(y_true, y_pred):
        tf.py_function(lambda rows: seen.extend(rows.numpy().tolist()), [y_true[:, 0]], [])
        return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)

    begin = compiled_once(lambda: pipeline(keras.optimizers.SGD(0.01), loss))

    def train(*callbacks):
        trained = begin()
        seen.clear()
        tf.random.set_seed(random.randrange(10**6))
        own = tnt.callbacks.Checkpoint(tmp_path)
        trained.fit(x, x[:, :3], batch_size=5, epochs=1, verbose=0, callbacks=[own, *callbacks])
        return {row for row in seen if row in x[:, 0]}  # the loss is tried on made-up values, too

    first, rest = train(At(2, stop)), train()
    assert (len(first), first & rest, first | rest) == (10, set(), {*x[:, 0]})


def test_callbacks_remember(tmp_path):
    """Learning rates go on from that of the step, and an early stop is one."""

    def go(directory, *more):
        callbacks = [
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.EarlyStopping("loss", baseline=0.0, patience=3),
        ]
        return run(directory, *callbacks, *more, validation_split=0.3, epochs=12)

    expected = go(None)
    assert len(expected[1]) < 12
    for step in (2, 7):
        go(tmp_path, At(step, stop))
    assert go(tmp_path) == expected
    assert go(tmp_path) == expected


def writing(folder):
    """Those that write what depends on what they remember."""
    folder.mkdir(exist_ok=True)
    save = keras.callbacks.ModelCheckpoint
    return [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        save(folder / "{epoch}-{loss:.9f}.weights.h5", save_weights_only=True, save_freq=3),
        save(folder / "b-{epoch}.keras", monitor="val_mae", save_best_only=True, mode="max"),
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
    ]


@pytest.mark.slow
def test_callbacks_of_keras_that_write_go_on(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    fit = {"validation_split": 0.1, "every": 1, "ema": True}
    expected = run(None, *writing(once), **fit)
    killed = mock.Mock(side_effect=KeyboardInterrupt)  # which no `fit` expects
    for step in (2, 6):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", *writing(again), At(step, killed), **fit)
    assert run(tmp_path / "run", *writing(again), **fit) == expected
    assert sorted(os.listdir(again)) == sorted(os.listdir(once))
    assert (again / "log.csv").read_text() == (once / "log.csv").read_text()


def test_an_epoch_that_ends_short_is_not_gone_on_with(tmp_path, caplog):
    """A checkpoint is due after the last step of the data, which nobody knows to be the last."""
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)  # four
    fit = {"data": lambda: {"x": batches, "steps_per_epoch": 6}, "epochs": 1, "every": 4}
    first = run(tmp_path, **fit)
    assert run(tmp_path, **fit) == first
    assert "nothing is trained: checkpoint" in caplog.text


@pytest.mark.slow
def test_callbacks_with_a_state_go_on(tmp_path, caplog):
    """In the middle of an epoch and at its end; one that is gone is named."""
    alone = Seen()
    expected = run(None, alone)
    for step in (2, 5, 8):
        run(tmp_path, Seen(), At(step, stop))
    assert run(tmp_path, again := Seen()) == expected
    assert repr(again.state_dict()) == repr(alone.state_dict())
    run(tmp_path, epochs=4)
    assert "no Seen is among the callbacks" in caplog.text


def test_a_state_that_json_cannot_keep_is_refused(tmp_path):
    seen = Seen()
    seen.state_dict = lambda: {"draw": random.Random(1)}
    with pytest.raises(ConfigurationError, match=r"Seen\.state_dict\(\) must return numbers"):
        run(tmp_path, seen)


def test_reached_epochs_train_nothing_and_more_go_on(tmp_path, caplog):
    first = run(tmp_path, epochs=2)
    assert run(tmp_path, epochs=2) == first
    assert "nothing is trained: checkpoint" in caplog.text
    assert run(tmp_path) == uninterrupted()
    assert run(tmp_path, initial_epoch=2) == uninterrupted()


@pytest.mark.slow
def test_fits_in_one_script_go_on_and_others_begin_as_ever(tmp_path):
    def fits(*callbacks):
        trained, found, fit = model(), [], {"batch_size": 5, "verbose": 0}
        for first, last in ((0, 2), (2, 3)):
            span = {"initial_epoch": first, "epochs": last}
            told = trained.fit(X, Y, callbacks=callbacks, **span, **fit)
            found += told.history["loss"][-(last - first) :]
        return found, trained.fit(X, Y, epochs=2, **fit).history

    assert fits(tnt.callbacks.Checkpoint(tmp_path, every=3)) == fits()


def test_sigterm_writes_a_checkpoint_and_ends_with_75(tmp_path):
    """At the end of an epoch; on ranks in the middle of one."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run(tmp_path, At(10, lambda _: signal.raise_signal(signal.SIGTERM)), validation_split=0.1)
    assert end.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert "step-00000010" in os.listdir(tmp_path)
    assert run(tmp_path, validation_split=0.1) == uninterrupted(validation_split=0.1)


def test_a_loss_that_is_not_finite_is_not_written(tmp_path, caplog):
    bad = X.copy()
    bad[3] = np.nan
    last = keras.callbacks.TerminateOnNaN()
    told = run(tmp_path, last, data=lambda: {"x": bad, "y": Y, "batch_size": 22})
    assert told[1] == [0]  # and training stops
    assert "writes no checkpoint: the loss is nan after step 1" in caplog.text
    assert not list(tmp_path.iterdir())
