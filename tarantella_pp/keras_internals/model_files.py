"""The private names of Keras that read a model file layer by layer, all in this one file.

Written against Keras 3.14 and 3.15; `tests/keras_internals/test_model_files.py` says which of them
a new version of Keras has changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import keras
from keras.src.saving import saving_lib
from keras.src.saving.serialization_lib import ObjectSharingScope

WEIGHTS, ASSETS, CONFIG = "model.weights.h5", "assets", "config.json"
"""What is what in a `.keras` file."""


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
    model: keras.Model, weights: BinaryIO, assets: Path | None, skipped: Iterable[Any]
) -> list[tuple[Any, Exception]]:
    """Has a model and its optimizer take over the state in a file, as Keras does.

    Args:
        model: The model, which is built.
        weights: The HDF5 file, which is read where it is needed, and closed.
        assets: The folder with what layers keep besides; `None` for none.
        skipped: Layers that keep theirs.

    Returns:
        Each layer that did not find its state there, and why.
    """
    errors: dict[int, tuple[Any, Exception]] = {}
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
                visited_saveables={id(layer) for layer in skipped},
                failed_saveables=set(),
                error_msgs=errors,
            )
    finally:
        store.close()
    return list(errors.values())
