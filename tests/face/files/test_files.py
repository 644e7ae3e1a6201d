"""Files are whole or not there, and those of plain Keras, which loads them and trains on."""

import copy
import io
import os
import pickle

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp import files
from tarantella_pp.errors import ConfigurationError, FileError
from tests.helpers.files import contents, full_disk
from tests.helpers.training import X, Y, compiled
from tests.zoo.models import sequential, two_in_two_out

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

WRITERS = {
    "model.keras": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
}


def stack():
    """A model whose files do not fit the disk that `full_disk` makes."""
    return keras.Sequential([keras.Input((200,)), *map(layers.Dense, (200, 200, 2))])


@pytest.fixture(scope="module")
def large():
    return tnt.PipelineModel(stack(), num_stages=2)


@pytest.fixture(scope="module")
def trained():
    model = tnt.PipelineModel(sequential(), num_stages=2, num_micro_batches=2)
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_files_and_is_named(tmp_path, large, name):
    WRITERS[name](large, tmp_path / name)
    before = contents(tmp_path)
    for size in (100_000, 1000, len(before[name]) - 100):  # also as HDF5 closes its file
        with full_disk(size), pytest.raises(FileError, match=str(tmp_path / name)):
            WRITERS[name](large, tmp_path / name)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("name", WRITERS)
def test_at_any_moment_the_old_files_or_the_new_ones_are_there(tmp_path, monkeypatch, large, name):
    """Looks at what is there before and after each of the steps that put files in their place."""
    path = tmp_path / name
    fresh = stack()
    new = large.get_weights()
    old = [weight + 1 for weight in new]
    steps = []

    def read():
        if name == "model.keras":
            return keras.saving.load_model(path).get_weights()
        fresh.set_weights([weight * 0 for weight in new])
        fresh.load_weights(path)
        return fresh.get_weights()

    def watched(function):
        def watch(*arguments):
            steps.append(function.__name__)
            function(*arguments)
            assert same(read(), old) or same(read(), new)

        return watch

    large.set_weights(old)
    WRITERS[name](large, path)
    large.set_weights(new)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", watched(os.replace))
        patch.setattr(files, "sync", watched(files.sync))
        WRITERS[name](large, path)
    assert same(read(), new)
    # The file is on the disk before it has its name, and then its name is.
    assert steps == ["sync", "replace", "sync"]


@pytest.mark.parametrize("build", [sequential, two_in_two_out])
def test_an_architecture_is_that_of_the_plain_model(build):
    plain = build()
    model = tnt.PipelineModel(plain, num_stages=2)
    made = [
        keras.models.model_from_json(model.to_json()),
        tnt.PipelineModel.from_config(model.get_config()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model)),
        keras.models.clone_model(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for other in made:
        assert type(other) is type(plain) or other is made[3]  # a Sequential becomes a Functional
        assert not isinstance(other, tnt.PipelineModel)
        assert [w.shape for w in other.weights] == [w.shape for w in plain.weights]
    assert made[1].get_config() == plain.get_config()
    assert (model.name, model.layers[-1].name) == (plain.name, plain.layers[-1].name)


def test_plain_keras_reads_the_optimizer_where_it_is_in_the_file(tmp_path, trained):
    trained.save_weights(tmp_path / "a.weights.h5")
    stock = compiled(sequential(), "adam", "mse", metrics=["mae"])
    stock.optimizer.build(stock.trainable_variables)
    stock.load_weights(tmp_path / "a.weights.h5")
    assert same(stock.get_weights(), trained.get_weights())
    assert same(
        map(np.array, stock.optimizer.variables), map(np.array, trained.optimizer.variables)
    )
    trained.save(tmp_path / "bare.keras", include_optimizer=False)
    bare = keras.saving.load_model(tmp_path / "bare.keras")
    assert not bare.compiled
    assert same(bare.get_weights(), trained.get_weights())


@pytest.mark.parametrize(
    "save",
    [
        lambda model, folder: model.save(folder / "old.h5"),
        lambda model, folder: model.save(io.BytesIO()),
        lambda model, folder: tnt.models.save_model(sequential(), io.BytesIO()),
        lambda model, folder: model.save(folder / "old.keras", overwrite=False),
        lambda model, folder: model.save(folder / "old.keras", zipped=False),
        lambda model, folder: model.save(folder / "old.keras", save_format="h5"),
        lambda model, folder: model.save_weights(folder / "old.weights.json", max_shard_size=1),
        lambda model, folder: tnt.models.save_model(sequential(), folder / "old.keras", False),
    ],
)
def test_what_cannot_be_written_is_refused_before(tmp_path, trained, save):
    for name in ("old.h5", "old.keras"):
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(ConfigurationError):
        save(trained, tmp_path)
    assert contents(tmp_path) == {"old.h5": b"old", "old.keras": b"old"}
