"""The private parts of Keras that read model files layer by layer, used in `model_files.py`."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.internals import model_files
from tarantella_pp.internals.model_files import deserialized, load_state

pytestmark = pytest.mark.keras


def stack():
    return keras.Sequential([keras.Input((2,)), layers.Dense(3), layers.Dense(4)])


def as_keras(dataset):
    """Reads no value in a way of its own."""


def test_state_is_read_of_an_open_file_but_for_what_is_skipped(tmp_path):
    model, other = stack(), stack()
    model.save_weights(tmp_path / "a.weights.h5")
    before = other.layers[1].get_weights()
    with warnings.catch_warnings(), (tmp_path / "a.weights.h5").open("rb") as file:
        warnings.simplefilter("error")
        failed = load_state(other, file, None, [other.layers[1]], as_keras)
    assert failed == [], "saving_lib._load_state"
    assert (other.layers[0].get_weights()[0] == model.layers[0].get_weights()[0]).all()
    assert (other.layers[1].get_weights()[0] == before[0]).all(), "visited_saveables"


def test_values_are_read_as_the_caller_says(tmp_path):
    model, other, asked = stack(), stack(), []
    model.save_weights(tmp_path / "a.weights.h5")

    def array_of(dataset):
        asked.append(dataset.shape)
        return dataset[()] + 1 if len(dataset.shape) == 2 else None

    with (tmp_path / "a.weights.h5").open("rb") as file:
        assert load_state(other, file, None, [], array_of) == []
    assert asked == [(2, 3), (3,), (3, 4), (4,)], "H5IOStore.__getitem__"
    for before, after in zip(model.get_weights(), other.get_weights(), strict=True):
        assert (after == before + (before.ndim == 2)).all()


def test_what_does_not_fit_is_told(tmp_path):
    model = stack()
    model.save_weights(tmp_path / "a.weights.h5")
    other = keras.Sequential([keras.Input((2,)), layers.Dense(3), layers.Dense(5)])
    with (tmp_path / "a.weights.h5").open("rb") as file:
        failed = load_state(other, file, None, [], as_keras)
    assert [layer for layer, _ in failed] == [other.layers[1]], "error_msgs"


def test_assets_are_read_of_a_folder(tmp_path):
    made, new = layers.IntegerLookup(), layers.IntegerLookup()
    made.adapt(np.arange(5))
    model = keras.Sequential([keras.Input((2,), dtype="int32"), made])
    folder = tmp_path / "assets" / "layers" / "integer_lookup"
    folder.mkdir(parents=True)
    made.save_assets(str(folder))
    model.save_weights(tmp_path / "a.weights.h5")
    other = keras.Sequential([keras.Input((2,), dtype="int32"), new])
    with (tmp_path / "a.weights.h5").open("rb") as file:
        assert load_state(other, file, tmp_path / "assets", [], as_keras) == []
    assert new.get_vocabulary() == made.get_vocabulary(), "DiskIOStore"


def test_objects_that_are_shared_stay_shared():
    l2 = keras.regularizers.L2(0.5)
    with model_files.ObjectSharingScope():
        config = keras.saving.serialize_keras_object({"first": l2, "second": l2})
    made = deserialized(config)
    assert made["first"] is made["second"]
