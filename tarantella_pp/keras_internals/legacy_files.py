"""The private names of Keras that write a model as a legacy `.h5` file, all in this one file.

Written against Keras 3.14 and 3.15; `tests/keras_internals/test_legacy_files.py` says which of
them a new version of Keras has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.legacy.saving import json_utils, legacy_h5_format, saving_utils


class _Slot:
    """A value that an optimizer has saved, as the legacy format asks for it."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self._value = np.asarray(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value, dtype)


class _Slots:
    """Stands for an optimizer: all that it saves."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        values: dict[str, Any] = {}
        optimizer.save_own_variables(values)
        self.weights = [_Slot(f"{optimizer.name}/{i}", value) for i, value in values.items()]


def write_legacy(
    path: Path, model: keras.Model, compiled: keras.Model, optimizer: Any = None
) -> None:
    """Writes a whole model as a legacy `.h5` file."""
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_model_to_hdf5(model, file, include_optimizer=False)
        if optimizer is not None:
            training = json.dumps(_compilation(compiled), default=json_utils.get_json_type)
            file.attrs["training_config"] = training.encode()
            legacy_h5_format.save_optimizer_weights_to_hdf5_group(file, _Slots(optimizer))


def _compilation(model: keras.Model) -> Any:
    """Describes a model's compilation; Keras' own code takes the optimizer out of it."""
    config = model._compile_config.config
    kept = dict(config)
    try:
        return saving_utils.model_metadata(model)["training_config"]
    finally:
        config.update(kept)
