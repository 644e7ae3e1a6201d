"""The private names of Keras that write and read model files layer by layer."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

import h5py
import keras
import numpy as np
from keras.src.saving import saving_lib
from keras.src.saving.serialization_lib import ObjectSharingScope

from tarantella_pp.internals.state import needs_only_shapes, outside_stateless_scopes

# What is what in a `.keras` file.
CONFIG, METADATA, WEIGHTS, ASSETS = "config.json", "metadata.json", "model.weights.h5", "assets"


# What reads a value of an HDF5 file; `None` for one that is read as Keras does.
TensorOf = Callable[[Any], Any]


class _ReadFile(saving_lib.H5IOStore):  # type: ignore[misc]
    """A file of Keras whose values are read with no copies."""

    def __init__(self, file: BinaryIO, tensor_of: TensorOf) -> None:
        opened = SimpleNamespace(open=lambda name, mode: file)  # a zip file with one member
        super().__init__(WEIGHTS, archive=opened, mode="r")
        self._tensor_of = tensor_of

    def __getitem__(self, key: str) -> Any:
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        found = None if "dtype" in dataset.attrs else self._tensor_of(dataset)
        return super().__getitem__(key) if found is None else found


@contextlib.contextmanager
def hdf5_errors() -> Iterator[None]:
    """Raises what the disk refuses once an HDF5 file is closed: HDF5 does not outlive an error."""
    make, errors = h5py.File.__init__, list[OSError]()

    class Draft(io.FileIO):
        def write(self, data: Any) -> int:
            left = memoryview(data)
            try:
                while left:
                    left = left[super().write(left) :]
            except OSError as error:
                errors.append(error)
            return len(data)

        def truncate(self, size: int | None = None) -> int:
            return (size or 0) if errors else super().truncate(size)

    def made(file: Any, name: Any, mode: str = "r", **options: Any) -> None:
        new = mode == "w" and isinstance(name, (str, os.PathLike))
        make(file, drafts.enter_context(Draft(name, "w+")) if new else name, mode, **options)

    try:
        with contextlib.ExitStack() as drafts, mock.patch.object(h5py.File, "__init__", made):
            yield
    finally:
        for error in errors[:1]:
            raise error


def twin_of(model: Any, **changes: Any) -> Any:
    """The same model, of the same class and with the same layers, but for some attributes."""
    twin = object.__new__(type(model))
    object.__setattr__(twin, "__dict__", {**vars(model), **changes})
    return twin


class StoredValue:
    """A value in a file, which is an initializer: it is read when a rank needs it."""

    def __init__(self, path: str, dataset: Any) -> None:
        self.path, self.name = path, dataset.name
        self.shape = dataset.shape
        packed = dataset.attrs.get("dtype") == "bfloat16"  # which HDF5 does not know
        self.dtype = keras.ops.zeros((), "bfloat16").numpy().dtype if packed else dataset.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Reads it."""
        with h5py.File(self.path, "r") as file:
            return np.array(file[self.name], self.dtype).astype(dtype or self.dtype, copy=False)

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Reads it, for a variable that begins with it."""
        if needs_only_shapes():
            return keras.ops.zeros(shape, dtype)
        return keras.ops.convert_to_tensor(np.asarray(self), dtype)


@contextlib.contextmanager
def values_read_later() -> Iterator[None]:
    """Lets variables without memory that a file is loaded into begin with what it has of them."""
    maker: Any = next(kind for kind in keras.Variable.__mro__ if "assign" in vars(kind))
    read, assign = saving_lib.H5IOStore.__getitem__, maker.assign

    def stored(store: Any, key: str) -> Any:
        dataset = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
        if store.mode != "r" or store.archive or not hasattr(dataset, "attrs"):
            return read(store, key)
        return StoredValue(os.path.abspath(dataset.file.filename), dataset)

    def assigned(variable: Any, value: Any) -> Any:
        if variable._value is not None:
            with outside_stateless_scopes():
                return assign(variable, value)
        if not isinstance(value, StoredValue) or value.shape != tuple(variable.shape):
            return assign(variable, value)  # which is refused
        variable._initializer = value
        return value

    with (
        mock.patch.object(saving_lib.H5IOStore, "__getitem__", stored),
        mock.patch.object(maker, "assign", assigned),
    ):
        yield


def called_by_writer() -> bool:
    """Whether the caller was asked by a function of Keras that is about to write a file."""
    asking = sys._getframe(2).f_code
    return asking in (saving_lib.save_model.__code__, saving_lib.save_weights_only.__code__)


def save_state(model: keras.Model, archive: zipfile.ZipFile, scratch: Path) -> None:
    """Writes a model and its optimizer into a `.keras` file; Keras has all of one in memory."""
    weights = saving_lib.H5IOStore(scratch, mode="w")
    assets = saving_lib.DiskIOStore(ASSETS, archive=archive, mode="w")
    visited: set[int] = set()
    try:
        optimizer = getattr(model, "optimizer", None)  # which Keras sets in `compile`
        if optimizer is not None:  # before a model inside, which may have the same one
            saving_lib._save_state(optimizer, weights, assets, "optimizer", visited)
        saving_lib._save_state(model, weights, assets, "", visited)
    finally:
        weights.close()
        assets.close()
    archive.write(scratch, WEIGHTS)
    scratch.unlink()


def deserialized(config: Any, custom_objects: Any = None, safe_mode: bool = True) -> Any:
    """Makes what `keras.saving.serialize_keras_object` has described."""
    with ObjectSharingScope():
        return keras.saving.deserialize_keras_object(
            config, custom_objects=custom_objects, safe_mode=safe_mode
        )


def load_state(
    model: keras.Model,
    weights: BinaryIO | Path,
    assets: Path | None,
    skipped: Iterable[Any],
    tensor_of: TensorOf,
    skip_mismatch: bool = False,
) -> list[tuple[Any, Exception]]:
    """Has a model and its optimizer take over the state in a file, as Keras does."""
    errors: dict[int, tuple[Any, Exception]] = {}
    if isinstance(weights, Path):
        store = saving_lib.ShardedH5IOStore(weights, mode="r")
    else:
        store = _ReadFile(weights, tensor_of)
    try:
        with warnings.catch_warnings():
            # A Functional model keeps its layers in other lists, too, which files do not mention.
            warnings.filterwarnings("ignore", message=r"Skipping nested container at '_operations")
            saving_lib._load_state(
                model,
                weights_store=store,
                assets_store=assets and saving_lib.DiskIOStore(str(assets), mode="r"),
                inner_path="",
                skip_mismatch=skip_mismatch,
                visited_saveables={id(layer) for layer in skipped},
                failed_saveables=set(),
                error_msgs=errors,
            )
    finally:
        store.close()
    return list(errors.values())
