"""`BackupAndRestore` on several ranks: it goes on as in one process, and refuses on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import pytest

import tarantella_pp as tnt
from tarantella_pp.callbacks.rank_rules import callbacks_of_rank
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.helpers.draws import more_asked_for
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, distance, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

ROUNDING = 1e-10
X, Y = X[:12], Y[:12]
QUIET = {"batch_size": 2, "shuffle": False, "verbose": 0}  # six steps an epoch, of one size
SHAPES = {"two stages": {"num_stages": 2, "num_micro_batches": 2}}
if more_asked_for():
    SHAPES["two replicas"] = {"num_stages": 1, "num_replicas": 2, "num_micro_batches": 1}
TWO_BY_TWO = {"num_stages": 2, "num_replicas": 2, "num_micro_batches": 1, "shard_optimizer": True}


def made(shape):
    keras.utils.set_random_seed(1)
    model = mlp() if shape is None else tnt.PipelineModel(mlp(), **shape)
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


class Fails(keras.callbacks.Callback):
    """Fails at a batch of an epoch, on all ranks."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise RuntimeError("the power is gone")


def fit(model, backup, epochs, *more):
    """Trains; returns epochs, logs, weights and steps, or the kind of an error."""
    try:
        told = model.fit(X, Y, epochs=epochs, callbacks=[backup, *more], **QUIET)
    except (RuntimeError, ValueError, OSError) as error:
        return [str(error), isinstance(error, ConfigurationError)]
    steps = int(model.optimizer.iterations)
    return [told.epoch, told.history, [w.tolist() for w in model.get_weights()], steps]


def alone(work):
    """Does something on one rank, while the others wait."""
    ranks = world()
    ranks.barrier()
    if ranks.rank == 0:
        work()
    ranks.barrier()


def interrupted(shape, folder):
    """Trains with interruptions, and from backups of all kinds.

    Args:
        shape: Options of a pipeline; `None` for plain Keras.
        folder: Where backups go; it has one of plain Keras.
    """
    folder, found = Path(folder), {}
    backup = keras.callbacks.BackupAndRestore(folder / "epochs")
    fit(made(shape), backup, 4, Fails(2, 0))
    found["epochs"] = fit(made(shape), backup, 4)

    def often():
        return keras.callbacks.BackupAndRestore(
            folder / "batches", save_freq=4, double_checkpoint=True, delete_checkpoint=False
        )

    fit(made(shape), often(), 3, Fails(1, 3))
    found["batches"] = fit(made(shape), often(), 3)
    weights = folder / "batches" / "latest.weights.h5"
    alone(lambda: weights.write_bytes(weights.read_bytes()[:999]))
    found["the one before"] = fit(made(shape), often(), 4)
    found["nothing left to do"] = fit(made(shape), often(), 3)
    kept = keras.callbacks.BackupAndRestore(folder / "of keras", delete_checkpoint=False)
    found["of plain Keras"] = fit(made(shape), kept, 3)
    return found


def damaged(shape, folder):
    """What is damaged, cannot be written or differs between ranks is refused on all of them."""
    folder, found = Path(folder), {}
    model = made(shape)
    backup = keras.callbacks.BackupAndRestore(folder / "here", delete_checkpoint=False)
    fit(made(shape), backup, 1)
    state = folder / "here" / "training_metadata.json"
    alone(lambda: state.write_text('{"epoch": '))
    found["metadata"] = fit(model, backup, 2)
    weights = folder / "here" / "latest.weights.h5"
    alone(lambda: weights.write_bytes(weights.read_bytes()[:999]))
    found["weights"] = fit(model, backup, 2)
    alone(lambda: (folder / "file").write_text(""))
    found["folder"] = fit(model, keras.callbacks.BackupAndRestore(folder / "file" / "x"), 1)
    freq = 2 + tnt.get_rank()
    found["frequency"] = fit(model, keras.callbacks.BackupAndRestore(folder / "y", freq), 1)
    found["afterwards"] = model.fit(X, Y, epochs=2, **QUIET).history
    return found


def on_ranks(folder):
    use_float64()
    found = {name: interrupted(shape, f"{folder}/{name}") for name, shape in SHAPES.items()}
    return found, damaged(SHAPES["two stages"], f"{folder}/damaged")


def on_four_ranks(folder):
    use_float64()
    return interrupted(TWO_BY_TWO, folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What plain Keras trains, and where it has left its backups."""
    folder = tmp_path_factory.mktemp("plain")
    backup = keras.callbacks.BackupAndRestore(folder / "of keras", delete_checkpoint=False)
    fit(made(None), backup, 2)
    backups = folder.parent / "backups"
    shutil.copytree(folder, backups)
    found = interrupted(None, folder)
    assert found["epochs"][0] == [2, 3]
    assert found["nothing left to do"][0] == []
    whole = made(None)
    whole.fit(X, Y, epochs=4, **QUIET)
    assert distance([w.tolist() for w in whole.get_weights()], found["epochs"][2]) < ROUNDING
    return found, backups


@pytest.mark.slow
def test_ranks_go_on_from_a_backup_as_one_process_does(tmp_path, plain):
    for name in SHAPES:
        shutil.copytree(plain[1], tmp_path / name)
    run = mpi_run(2, on_ranks, str(tmp_path), timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    (found, first), (theirs, last) = run.results
    assert found == theirs
    for name in SHAPES:
        assert distance(plain[0], found[name]) < ROUNDING, name
        assert not (tmp_path / name / "epochs").exists()
        again = fit(made(None), keras.callbacks.BackupAndRestore(tmp_path / name / "batches"), 5)
        assert again[0] == [3, 4]
    check_damaged(first, last)


def check_damaged(first, last):
    for name in ("metadata", "weights", "folder"):
        assert not last[name][1]
        assert first[name][1]
        assert "Rank 1 could not" in first[name][0]
        assert last[name][0] in first[name][0]
    assert first["frequency"] == last["frequency"]
    assert "save_freq='2'" in first["frequency"][0]
    assert first["afterwards"] == last["afterwards"]


@pytest.mark.slow
def test_two_stages_with_two_replicas_go_on_from_a_backup(tmp_path, plain):
    folder = tmp_path / "backups"
    shutil.copytree(plain[1], folder)
    run = mpi_run(4, on_four_ranks, str(folder), timeout=240, env={"TNT_TIMEOUT": "60"}).check()
    assert all(found == run.results[0] for found in run.results)
    assert distance(plain[0], run.results[0]) < ROUNDING


class Own(keras.callbacks.BackupAndRestore):
    """A backup of somebody's own."""


def test_backups_of_an_own_class_are_refused_on_several_ranks(tmp_path):
    ranks = Communicator()
    assert callbacks_of_rank(Own(tmp_path), None, ranks)
    ranks.size = 2
    with pytest.raises(ConfigurationError, match="Own is a BackupAndRestore of your own"):
        callbacks_of_rank([Own(tmp_path)], None, ranks)
