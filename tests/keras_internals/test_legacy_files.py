"""The private parts of Keras that write legacy files, all used in `legacy_files.py`."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest

from tarantella_pp.keras_internals.legacy_files import write_legacy

pytestmark = pytest.mark.keras


def test_files_are_those_that_keras_writes(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)], name="one")
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
    write_legacy(tmp_path / "a.h5", model, model, model.optimizer)
    assert "optimizer" in model._compile_config.config
    model.save(tmp_path / "b.h5")
    first, second = (h5py.File(tmp_path / name) for name in ("a.h5", "b.h5"))
    assert {**first.attrs} == {**second.attrs}
    assert set(names_in(first["model_weights"])) == set(names_in(second["model_weights"]))
    slots = [
        [group[name][()].tolist() for name in group.attrs["weight_names"]]
        for group in (first["optimizer_weights"], second["optimizer_weights"])
    ]
    assert slots[0] == slots[1]


def names_in(group):
    found = []
    group.visit(found.append)
    return found
