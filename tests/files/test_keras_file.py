"""A `.keras` file is read in parts, and one that is not as it was written is refused."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files import keras_file
from tarantella_pp.files.keras_file import KerasFile

pytestmark = pytest.mark.keras


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with weights and assets."""
    ids = keras.Input((5,), dtype="int32")
    lookup = layers.IntegerLookup()
    lookup.adapt(np.arange(7))
    model = keras.Model(
        ids, layers.Dense(300)(layers.Flatten()(layers.Embedding(9, 40)(lookup(ids))))
    )
    path = tmp_path_factory.mktemp("files") / "model.keras"
    model.save(path)
    return path


def packed_anew(path, target, compression):
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return target


def weights_in(file):
    found = {}
    with file.weights() as data, h5py.File(data) as h5:
        h5.visititems(lambda name, x: found.update({name: x[()]}) if hasattr(x, "shape") else None)
    return found


@pytest.mark.parametrize("kind", ["stored", "compressed", "open", "behind other bytes"])
def test_parts_are_those_of_the_file(saved, tmp_path, kind):
    path = saved
    if kind == "compressed":
        path = packed_anew(saved, tmp_path / "small.keras", zipfile.ZIP_DEFLATED)
    elif kind == "behind other bytes":
        path = tmp_path / "late.keras"
        path.write_bytes(b"something else" + saved.read_bytes())
    given = io.BytesIO(path.read_bytes()) if kind == "open" else path
    file = KerasFile(given)
    found = weights_in(file)
    with (
        zipfile.ZipFile(saved) as whole,
        h5py.File(io.BytesIO(whole.read("model.weights.h5"))) as h5,
    ):
        assert len(found) == 3
        assert all((h5[name][()] == value).all() for name, value in found.items())
    with file.assets() as folder:
        assert [path.name for path in folder.rglob("*.txt")] == ["vocabulary.txt"]
    assert file.config["class_name"] == "Functional"
    assert file.contents == KerasFile(saved).contents
    file.close()
    assert not getattr(given, "closed", False)
    assert sorted(tmp_path.iterdir()) == ([path] if path != saved else [])


def test_no_more_is_read_than_asked_for(saved, monkeypatch):
    counts, read = [], keras_file._Part.readinto

    def counted(part, buffer):
        counts.append(count := read(part, buffer))
        return count

    monkeypatch.setattr(keras_file._Part, "readinto", counted)
    with KerasFile(saved).weights() as data, h5py.File(data) as h5:
        embeddings = h5["layers/embedding/vars/0"][()]
    assert embeddings.nbytes < sum(counts) < embeddings.nbytes + 30_000 < saved.stat().st_size


def damaged(data, kind):
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "changed":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    if kind == "empty":
        return b""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        if kind == "another zip":
            file.writestr("readme.txt", "hello")
        if kind == "no weights":
            file.writestr("config.json", "{}")
        if kind == "no JSON":
            file.writestr("config.json", "hello")
            file.writestr("model.weights.h5", "")
        if kind == "bomb":
            file.writestr("model.weights.h5", bytes(300 * 2**20))
    return out.getvalue()


KINDS = "truncated", "changed", "empty", "another zip", "no weights", "no JSON", "bomb"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused_by_name(saved, tmp_path, kind):
    path = tmp_path / "bad.keras"
    path.write_bytes(damaged(saved.read_bytes(), kind))
    with pytest.raises(ConfigurationError, match=r"bad\.keras.*(copy|save) it again"):
        KerasFile(path)
    with pytest.raises(ConfigurationError, match=r"BytesIO.*(copy|save) it again"):
        KerasFile(io.BytesIO(path.read_bytes()))


def test_what_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.keras.*put it where all of them can"):
        KerasFile(tmp_path / "none.keras")


def test_a_compressed_file_in_a_folder_that_is_not_ours(saved, tmp_path, monkeypatch):
    path = packed_anew(saved, tmp_path / "small.keras", zipfile.ZIP_DEFLATED)
    make = keras_file.tempfile.TemporaryFile

    def only_elsewhere(dir=None):
        if dir is not None:
            raise PermissionError(dir)
        return make()

    monkeypatch.setattr(keras_file.tempfile, "TemporaryFile", only_elsewhere)
    assert len(weights_in(KerasFile(path))) == 3


def test_a_path_may_be_relative_and_a_link(saved, tmp_path, monkeypatch):
    os.symlink(saved, tmp_path / "link.keras")
    monkeypatch.chdir(tmp_path)
    assert KerasFile(Path("link.keras")).contents == KerasFile(str(saved)).contents
