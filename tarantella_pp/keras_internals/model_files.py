"""The private names of Keras that write and read model files layer by layer, all in this one file.

Written against Keras 3.14 and 3.15; `tests/keras_internals/test_model_files.py` says which of them
a new version of Keras has changed.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import keras
from keras.src.saving import saving_lib
from keras.src.saving.serialization_lib import ObjectSharingScope

CONFIG, METADATA, WEIGHTS, ASSETS = "config.json", "metadata.json", "model.weights.h5", "assets"
"""What is what in a `.keras` file."""


def save_state(model: keras.Model, archive: zipfile.ZipFile, scratch: Path) -> None:
    """Writes the state of a model and its optimizer into a `.keras` file, one variable at a time.

    Keras itself has all of it in memory meanwhile.

    Args:
        model: The model.
        archive: The file.
        scratch: Where nothing is yet, for the HDF5 file until it is complete.
    """
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


class _Opened:
    """Stands for a zip file with one member, which is open already."""

    def __init__(self, member: BinaryIO) -> None:
        self._member = member

    def open(self, name: str, mode: str) -> BinaryIO:
        """Returns the member."""
        return self._member


def deserialized(config: Any, custom_objects: Any = None, safe_mode: bool = True) -> Any:
    """Makes what `keras.saving.serialize_keras_object` has described.

    Args:
        config: The description, of a model or of what it was compiled with.
        custom_objects: As of `keras.saving.load_model`.
        safe_mode: As of `keras.saving.load_model`.
    """
    with ObjectSharingScope():
        return keras.saving.deserialize_keras_object(
            config, custom_objects=custom_objects, safe_mode=safe_mode
        )


def load_state(
    model: keras.Model,
    weights: BinaryIO | Path,
    assets: Path | None,
    skipped: Iterable[Any],
    skip_mismatch: bool = False,
) -> list[tuple[Any, Exception]]:
    """Has a model and its optimizer take over the state in a file, as Keras does.

    Args:
        model: The model, which is built.
        weights: The HDF5 file, which is read where it is needed, and closed; or the path of the
            index of several.
        assets: The folder with what layers keep besides; `None` for none.
        skipped: Layers that keep theirs.
        skip_mismatch: Whether layers that do not fit keep theirs, too.

    Returns:
        Each layer that did not find its state there, and why.
    """
    errors: dict[int, tuple[Any, Exception]] = {}
    if isinstance(weights, Path):
        store = saving_lib.ShardedH5IOStore(weights, mode="r")
    else:
        store = saving_lib.H5IOStore(WEIGHTS, archive=_Opened(weights), mode="r")
    try:
        with warnings.catch_warnings():
            # A Functional model keeps its layers in other lists, too, of which files say nothing.
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
