"""A run that dies goes on where its newest checkpoint was written, as if it had not died."""

import math
import os
import signal
import sys
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.callbacks import checkpoint_folder, checkpoint_reader
from tarantella_pp.errors import TarantellaError
from tests.helpers.mpi import mpi_run
from tests.helpers.training import BITS, compiled_once, floats, use_float64
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

X, Y = floats(6, seed=1)[:20], floats(3, seed=2)[:20]
# Steps of one size, for which stages are traced once; four in each epoch.
FIT = {"batch_size": 4, "epochs": 3, "verbose": 0, "validation_split": 0.2}


def network():
    keras.utils.set_random_seed(1)
    first, norm = layers.Dense(8, activation="tanh"), layers.LayerNormalization()
    return chain((6,), first, layers.Dropout(0.3), norm, layers.Dropout(0.2), layers.Dense(3))


def compiled(deferred=False, **options):
    options = {"num_stages": 2, "num_micro_batches": 2, "balance": "memory", **options}
    model = tnt.PipelineModel(network if deferred else network(), **options)
    rate = keras.optimizers.schedules.ExponentialDecay(1e-2, 3, 0.9)
    adam = keras.optimizers.Adam(rate, use_ema=True, global_clipnorm=1.0)
    scaled = keras.optimizers.LossScaleOptimizer(adam, dynamic_growth_steps=4)
    model.compile(scaled, "mse", metrics=["mae"])
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
    """Remembers what it is told, and which rank it is on; sets the learning rate by it."""

    def __init__(self):
        super().__init__()
        self.losses, self.epochs, self.best = np.zeros(0), 0, math.inf
        self.best_weights = {"none": "of Keras"}

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def on_train_batch_end(self, batch, logs=None):
        self.losses, self.rank = np.append(self.losses, logs["loss"]), tnt.get_rank()
        self.best = min(self.best, logs["loss"])
        if isinstance(self.model.optimizer, keras.optimizers.SGD):
            self.model.optimizer.learning_rate = 0.1 * float(np.mean(self.losses[-3:]))

    def state_dict(self):
        return {"losses": self.losses, "epochs": self.epochs, "best": self.best}

    def load_state_dict(self, state):
        self.losses, self.epochs, self.best = state["losses"], state["epochs"], state["best"]


def trained(directory, *callbacks, every=3, model=None, data=(X, Y), **options):
    """Its history, epochs and weights, what a callback remembers, and the scale of the loss."""
    model = compiled() if model is None else model
    keras.utils.set_random_seed(1)
    own = [] if directory is None else [tnt.callbacks.Checkpoint(directory, every=every)]
    seen = Seen()
    told = model.fit(*data, callbacks=[*own, seen, *callbacks], **{**FIT, **options})
    weights = [w.tolist() for w in model.get_weights()]
    scale = [float(v) for v in (model.optimizer.dynamic_scale, model.optimizer.step_counter)]
    return [told.history, told.epoch, weights, [seen.losses.tolist(), seen.epochs, scale]]


def killed(directory):
    """A rank is killed in the middle of an epoch, a step after a checkpoint."""
    use_float64()
    trained(directory, *[At(7, kill)] * tnt.get_rank())


def shapes(ours, theirs):
    """Ends a run on a stream that one process began, and leaves another half done."""
    use_float64()
    options = {"num_stages": 2, "num_replicas": 2, "num_micro_batches": 1, "shard_optimizer": True}
    resumed = trained(theirs, model=compiled(deferred=True, **options), **STREAM)
    trained(ours, At(6, stop), model=compiled(**options))
    return [resumed, sorted(os.listdir(ours))]


# Samples that one rank reads, again up to where it was.
SAMPLES = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).cache()
STREAM = {"data": [SAMPLES.batch(4)], "validation_split": 0.0, "batch_size": None}


@pytest.mark.mpi
@pytest.mark.slow
def test_another_number_of_stages_and_replicas_goes_on(tmp_path):
    """Two replicas of two stages with a sharded optimizer; the first half is that of one process.

    Two micro-batches in all cases, so that dropout draws the same.
    """
    begin = compiled_once(compiled)
    trained(tmp_path / "theirs", At(6, stop), model=begin(), **STREAM)
    run = mpi_run(4, shapes, str(tmp_path / "ours"), str(tmp_path / "theirs"), timeout=240).check()
    expected = trained(None, model=begin(), **STREAM)
    for resumed, kept in run.results:
        assert close(resumed, expected)
        assert kept == ["step-00000003", "step-00000006"]
    # One rank of each stage has written the weights, those of all replicas their slots.
    assert len(list((tmp_path / "ours" / "step-00000006").iterdir())) == 6
    resumed = trained(tmp_path / "ours", model=begin())
    assert close(resumed, trained(None, model=begin()))


def close(one, other):
    """Whether two runs came to the same losses, metrics and weights, to rounding."""
    histories = [one[0], other[0]]
    assert list(histories[0]) == list(histories[1])
    assert one[1] == other[1]
    pairs = [(histories[0][name], histories[1][name]) for name in histories[0]]
    pairs += zip(one[2] + one[3], other[2] + other[3], strict=True)
    return all(np.allclose(a, b, rtol=BITS, atol=BITS) for a, b in pairs)


def troubles(directory):
    """What ranks are told when one of them has a problem, and how all go on afterwards."""
    use_float64()
    rank, model = tnt.get_rank(), compiled()
    patch, told, full = pytest.MonkeyPatch(), [], OSError(28, "No space left on device")

    def caught(*callbacks, where=directory, error=TarantellaError):
        try:
            trained(where, *callbacks, model=model)
        except error as raised:
            told.append(f"{type(raised).__name__}: {raised}")

    # The kill may have left half of a checkpoint, which the first `fit` removes.
    before = [name for name in there(directory) if not name.startswith(".")]
    with patch.context() as only:
        if rank == 1:
            only.setattr(checkpoint_reader, "sha256_of", lambda path: "other")
        caught()
    with patch.context() as only:
        if rank == 1:
            only.setattr(checkpoint_folder, "FORMAT", 3)
        caught()
    caught(where=f"{directory}-{rank}")
    with patch.context() as only:
        if rank == 1:
            only.setattr(checkpoint_folder, "write_tensors", mock.Mock(side_effect=full))
        # In the step after the one that rank 1 does not write; rank 0 waits for its part.
        caught(*[At(7, joined), At(10, joined)] * rank)
    told += [int(model.optimizer.iterations), there(directory) == before]
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


def joined(callback=None):
    """Waits until what is being written is there, or is not."""
    for thread in threading.enumerate():
        if thread.name.startswith("tarantella-checkpoint"):
            thread.join()


def leave(code):
    raise SystemExit(code)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_a_killed_rank_and_the_trouble_of_one_rank_change_no_bit(tmp_path):
    directory = str(tmp_path / "run")
    run = mpi_run(2, killed, directory, timeout=150)
    assert run.returncode != 0
    assert "Traceback" not in run.stderr, run.stderr
    assert not run.timed_out, run.stderr
    run = mpi_run(2, troubles, directory, timeout=200).check()
    for told, resumed, expected in run.results:
        contents, version, others, disk, step, unchanged, code, left = told
        assert "ConfigurationError: All ranks must see the same checkpoints" in contents
        assert "ranks [1]" in contents
        assert "FormatError" in version
        assert "has format 2, this version reads 3" in version
        assert "ConfigurationError: All ranks must make the same calls" in others
        assert "Checkpoint(directory=" in others
        assert "FileError: Rank 1 could not write a checkpoint" in disk
        assert "No space left on device. Older checkpoints are unchanged" in disk
        # It went on from step 3, or from 6; the next one is due after 9, or 12.
        assert step in (8, 11)
        assert unchanged
        assert code == "SystemExit: 75"
        assert left[-1] in ("step-00000008", "step-00000009")
        assert resumed == expected
