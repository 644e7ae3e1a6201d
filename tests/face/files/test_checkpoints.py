"""A run that dies goes on where its newest checkpoint was written, as if it had not died."""

from __future__ import annotations

import os
import signal
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import TarantellaError
from tarantella_pp.files import checkpoint_reader, checkpoint_writer, manifest
from tests.helpers.draws import more_asked_for
from tests.helpers.jobs import PYTHONS, tarantella
from tests.helpers.mpi import mpi_run
from tests.helpers.training import floats, use_float64

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

X, Y = floats(6, seed=1), floats(3, seed=2)
STEPS = 4 * 4  # the last of an epoch has one sample
FIT = {"batch_size": 5, "epochs": 4, "verbose": 0, "validation_split": 0.25}
BITS = 1e-13


def network():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.Dropout(0.3)(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(8, activation="relu", use_bias=False)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(x)))


def compiled(deferred=False, **options):
    options = {"num_stages": 2, "num_micro_batches": 2, "balance": "memory", **options}
    model = tnt.PipelineModel(network if deferred else network(), **options)
    rate = keras.optimizers.schedules.ExponentialDecay(1e-2, 3, 0.9)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, use_ema=True, global_clipnorm=1.0)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class At(keras.callbacks.Callback):
    """Does something after a number of steps of the run."""

    def __init__(self, step, act):
        super().__init__()
        self.step = step
        self.act = act

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            self.act(self)


def stop(callback):
    callback.model.stop_training = True


def kill(callback):
    os.kill(os.getpid(), signal.SIGKILL)


class Seen(keras.callbacks.Callback):
    """Remembers what it is told, and which rank it is on."""

    def __init__(self):
        super().__init__()
        self.losses, self.epochs = [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.rank = tnt.get_rank()

    def state_dict(self):
        return {"losses": self.losses, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.losses, self.epochs = list(state["losses"]), state["epochs"]


def trained(directory, *callbacks, every=3, model=None, data=(X, Y), **options):
    """What a run comes to: its history, its epochs, its weights, and what a callback remembers."""
    model = compiled() if model is None else model
    own = [] if directory is None else [tnt.callbacks.Checkpoint(directory, every=every)]
    seen = Seen()
    told = model.fit(*data, callbacks=[*own, seen, *callbacks], **{**FIT, **options})
    weights = [w.tolist() for w in model.get_weights()]
    return [told.history, told.epoch, weights, [seen.losses, seen.epochs]]


def killed(directory, step, rank):
    """Goes on until a rank is killed, after so many steps; with rank -1, to the end."""
    use_float64()
    if rank < 0:
        return [trained(directory), trained(None)]
    return trained(directory, *[At(step, kill)] * (tnt.get_rank() == rank))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("number", range(5 if more_asked_for() else 1))
def test_killed_ranks_change_no_bit(tmp_path, number):
    draw, kills = np.random.default_rng(number), [(13, 1)]
    if number:
        kills = [
            (step, int(draw.integers(2))) for step in sorted(draw.integers(3, STEPS, 4).tolist())
        ]
    for step, rank in kills:
        run = mpi_run(2, killed, str(tmp_path), step, rank, timeout=150)
        assert "Traceback" not in run.stderr, run.stderr
        assert not run.timed_out, run.stderr
    run = mpi_run(2, killed, str(tmp_path), 0, -1, timeout=150).check()
    for resumed, uninterrupted in run.results:
        assert resumed == uninterrupted


def half_way(directory, step=6, **options):
    """A run that its user ends in the middle of an epoch."""
    trained(directory, At(step, stop), **options)


def shapes(ours, theirs):
    """Ends a run of one process on these ranks, and leaves one half done."""
    use_float64()
    options = {"num_stages": 2, "num_replicas": 2, "num_micro_batches": 1, "shard_optimizer": True}
    resumed = trained(theirs, model=compiled(deferred=True, **options))
    half_way(ours, model=compiled(**options))
    kept = sorted(os.listdir(ours))
    stream = trained(f"{theirs}-stream", model=compiled(**options), **streamed())
    return [resumed, kept, stream]


def streamed():
    """Samples that one rank reads, again up to where it was."""
    samples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).cache()
    return {
        "data": [samples.batch(5).map(lambda x, y: (x, y))],
        "validation_split": 0.0,
        "batch_size": None,
    }


@pytest.mark.mpi
@pytest.mark.slow
def test_another_number_of_stages_and_replicas_goes_on(tmp_path):
    """Two replicas of two stages with a sharded optimizer; the first half is that of one process.

    Two micro-batches in all cases, so that dropout draws the same.
    """
    expected = trained(None)
    half_way(tmp_path / "theirs")
    half_way(tmp_path / "theirs-stream", **streamed())
    run = mpi_run(4, shapes, str(tmp_path / "ours"), str(tmp_path / "theirs"), timeout=240).check()
    expected_stream = trained(None, **streamed())
    for resumed, kept, stream in run.results:
        assert close(resumed, expected)
        assert close(stream, expected_stream)
        assert kept == ["step-00000003", "step-00000006"]
    # One rank of each stage has written the weights, those of all replicas their slots.
    assert len(list((tmp_path / "ours" / "step-00000006").iterdir())) == 6
    assert close(trained(tmp_path / "ours"), expected)


def close(one, other):
    """Whether two runs came to the same losses, metrics and weights, to rounding."""
    histories = [one[0], other[0]]
    assert list(histories[0]) == list(histories[1])
    assert one[1] == other[1]
    pairs = [(histories[0][name], histories[1][name]) for name in histories[0]]
    pairs += zip(one[2] + one[3], other[2] + other[3], strict=True)
    return all(np.allclose(a, b, rtol=BITS, atol=BITS) for a, b in pairs)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_sigterm_to_the_launcher_ends_with_75_and_the_run_goes_on(python, tmp_path):
    with tarantella(python, "-n", "2", "--", "preempted.py", str(tmp_path), "0.1") as job:
        job.wait_until_ready()
        job.send(signal.SIGTERM)
        result = job.result()
        left = job.processes()
    assert result.code == 75, result.stderr
    assert not left
    (folder,) = os.listdir(tmp_path)
    assert folder.startswith("step-")
    with tarantella(python, "-n", "2", "--", "preempted.py", str(tmp_path), "0") as job:
        result = job.result()
    assert result.code == 0, result.stderr
    assert "goes on from checkpoint" in result.stdout
    assert "steps: 200" in result.stdout


def troubles(directory):
    """What ranks are told when one of them has a problem, and how all go on afterwards."""
    use_float64()
    rank = tnt.get_rank()
    patch = pytest.MonkeyPatch()
    told = []

    def caught(*callbacks, where=directory, error=TarantellaError, model=None):
        try:
            trained(where, *callbacks, model=model)
        except error as raised:
            told.append(f"{type(raised).__name__}: {raised}")

    half_way(directory)
    before = there(directory)
    with patch.context() as only:
        if rank == 1:
            only.setattr(checkpoint_writer, "write_tensors", full)
        caught()
    told.append(there(directory) == before)
    untrained = compiled()
    with patch.context() as only:
        if rank == 1:
            only.setattr(checkpoint_reader, "sha256_of", lambda path: "other")
        caught(model=untrained)
    with patch.context() as only:
        if rank == 1:
            only.setattr(manifest, "FORMAT", 3)
        caught(model=untrained)
    caught(where=f"{directory}-{rank}", model=untrained)
    terminate = [At(8, lambda callback: os.kill(os.getpid(), signal.SIGTERM))]
    with patch.context() as only:
        only.setattr(sys, "exit", leave)  # not that of the guard, which would remember
        caught(*terminate * (rank == 0), error=SystemExit)
    told.append(there(directory))
    return [told, trained(directory), trained(None)]


def there(directory):
    """What is there once rank 0 has tidied up."""
    tnt.barrier()
    return sorted(os.listdir(directory))


def leave(code):
    raise SystemExit(code)


def full(*arguments):
    raise OSError(28, "No space left on device")


@pytest.mark.mpi
@pytest.mark.slow
def test_the_trouble_of_one_rank_is_told_on_all(tmp_path):
    directory = str(tmp_path / "run")
    run = mpi_run(2, troubles, directory, timeout=200).check()
    for told, resumed, expected in run.results:
        disk, unchanged, contents, version, others, code, left = told
        assert "FileError: Rank 1 could not write a checkpoint" in disk
        assert "No space left on device. Older checkpoints are unchanged" in disk
        assert unchanged
        assert "ConfigurationError: All ranks must see the same checkpoints" in contents
        assert "ranks [1]" in contents
        assert "FormatError" in version
        assert "has format 2, this version reads 3" in version
        assert "ConfigurationError: All ranks must make the same calls" in others
        assert "Checkpoint(directory=" in others
        assert code == "SystemExit: 75"
        assert left[-1] in ("step-00000008", "step-00000009")
        assert resumed == expected
