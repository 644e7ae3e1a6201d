"""A `.keras` file is read in parts, and one that is not as it was written is refused."""

import io
import zipfile

import h5py
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models import keras_file
from tarantella_pp.models.keras_file import KerasFile
from tests.zoo.models import chain

pytestmark = pytest.mark.keras


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with weights and assets."""
    lookup = layers.IntegerLookup()
    lookup.adapt(np.arange(7))
    steps = layers.Embedding(9, 40), layers.Flatten(), layers.Dense(300)
    model = chain((5,), lookup, *steps, dtype="int32")
    path = tmp_path_factory.mktemp("files") / "model.keras"
    model.save(path)
    return path


@pytest.mark.parametrize("kind", ["stored", "compressed", "behind other bytes"])
def test_parts_are_those_of_the_file(saved, tmp_path, kind):
    path = saved
    if kind == "compressed":
        path = tmp_path / "small.keras"
        with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
    elif kind == "behind other bytes":
        path = tmp_path / "late.keras"
        path.write_bytes(b"something else" + saved.read_bytes())
    file, found = KerasFile(path), {}
    with file.weights() as data, h5py.File(data) as h5:
        assert not isinstance(data, zipfile.ZipExtFile)  # what is packed is slow to go back in
        h5.visititems(lambda name, x: found.update({name: x[()]}) if hasattr(x, "shape") else None)
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


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name.replace("_", "."), data)
    return out.getvalue()


def changed(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "changed": lambda data: changed(data, len(data) // 2),
    "empty": lambda data: b"",
    "another zip": lambda data: zipped(readme_txt="hello"),
    "no weights": lambda data: zipped(config_json="{}"),
    "no JSON": lambda data: zipped(config_json="hello", model_weights_h5=""),
    "bomb": lambda data: zipped(model_weights_h5=bytes(300 * 2**20)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_refused_by_name(saved, tmp_path, kind):
    path = tmp_path / "bad.keras"
    path.write_bytes(DAMAGE[kind](saved.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"bad\.keras.*(copy|save) it again"):
        KerasFile(path)


def test_what_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.keras.*put it where all of them can"):
        KerasFile(tmp_path / "none.keras")
