"""Keras' callbacks, in a pipeline and in plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tarantella_pp.callbacks.lockstep import Lockstep
from tarantella_pp.callbacks.rank_rules import callbacks_of_rank, kinds_of_all_ranks
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator
from tests.helpers.training import CASES, Case, X, Y, make, regression
from tests.zoo.models import mlp

pytestmark = pytest.mark.keras


def test_not_a_number_stops_training():
    case = Case(mlp, X, Y, regression(optimizer=lambda: keras.optimizers.SGD(1e200)))
    model = make(case, num_stages=1, num_micro_batches=1)
    told = model.fit(
        X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    assert len(told.history["loss"]) == 1
    assert not np.isfinite(told.history["loss"][0])


def test_a_callback_that_stops_training_and_the_progress_bar(capsys):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.stop_training = True

    model = make(CASES["mlp"], num_stages=1, num_micro_batches=1)
    history = model.fit(X, Y, batch_size=8, epochs=5, verbose=2, callbacks=Stop()).history
    assert len(history["loss"]) == 2
    printed = capsys.readouterr().out
    assert printed.count("Epoch ") == printed.count("3/3 - ") == 2


class Ranks(Communicator):
    """Some ranks, seen from one of them."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_one_rank_writes():
    every = [
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ModelCheckpoint("a.keras"),
    ]
    assert callbacks_of_rank(every, None, Ranks(0, 1)) is every
    for rank, expected in ((0, every[1:]), (1, every)):
        *found, last = callbacks_of_rank(every, None, Ranks(rank, 2))
        assert [c for c in found if c in every] == expected
        assert isinstance(last, Lockstep)
        held = keras.callbacks.CallbackList(every, add_history=True, epochs=3)
        own = callbacks_of_rank(held, None, Ranks(rank, 2))
        assert [c for c in own.callbacks if c in every] == expected
        histories = [c for c in own.callbacks if isinstance(c, keras.callbacks.History)]
        assert histories == [c for c in held.callbacks if isinstance(c, keras.callbacks.History)]
        assert own.params == {"epochs": 3}


def test_backups_are_refused_on_several_ranks(tmp_path):
    backup = [keras.callbacks.BackupAndRestore(tmp_path)]
    assert callbacks_of_rank(backup, None, Ranks(0, 1)) is backup
    with pytest.raises(ConfigurationError, match=r"Use tnt\.callbacks\.Checkpoint"):
        callbacks_of_rank(backup, None, Ranks(0, 2))


def test_what_all_ranks_must_have():
    quiet, loud = (keras.callbacks.TensorBoard("a", histogram_freq=n) for n in (0, 1))
    every = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.EarlyStopping("loss"), quiet]
    assert kinds_of_all_ranks(every) == ["EarlyStopping"]
    assert kinds_of_all_ranks(keras.callbacks.CallbackList([loud])) == ["TensorBoard"]
    assert kinds_of_all_ranks(None) == []
