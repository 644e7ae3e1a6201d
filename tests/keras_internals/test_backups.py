"""The private parts of Keras that backups rely on, all used in `keras_internals/backups.py`."""

from __future__ import annotations

import inspect

import keras
import pytest

from tarantella_pp.keras_internals.backups import BackedUp, back_up, saves_on_batch
from tarantella_pp.keras_internals.epochs import start_epoch

pytestmark = pytest.mark.keras


def test_a_backup_asks_its_model_for_nothing_else(tmp_path):
    asked = []
    model = BackedUp(lambda method, **arguments: asked.append((method, arguments)))
    backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=2)
    backup.set_model(model)
    backup.on_train_begin()
    assert model.first_epoch is None
    assert [saves_on_batch(backup, batch) for batch in range(4)] == [False, True, False, True]
    backup.on_epoch_end(4)
    back_up(backup)
    path = tmp_path / "latest.weights.h5"
    assert asked == [("save_weights", {"filepath": str(path), "overwrite": True})]
    path.touch()
    backup.on_train_begin()
    assert asked[1:] == [("load_weights", {"filepath": str(path)})]
    assert model.first_epoch == 5


def test_fit_looks_for_the_epoch_after_callbacks_have_begun():
    source = inspect.getsource(keras.Model.fit)
    assert source.index("on_train_begin()") < source.index("self._initial_epoch")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert model._initial_epoch is None
    start_epoch(model, 3)
    assert model._initial_epoch == 3
