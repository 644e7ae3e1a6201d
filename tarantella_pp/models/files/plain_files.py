"""Files of a pipeline: those of the plain Keras model that it trains."""

from __future__ import annotations

import datetime
import json
import zipfile
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.keras_internals.model_files import CONFIG, METADATA, WEIGHTS, save_state
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.runtime.state.remote_variables import rows_of


def plain_model(extracted: ExtractedModel, optimizer: Any = None) -> keras.Model:
    """Makes a stock Keras model of the same layers, to save or to load."""
    name = extracted.model.name
    plain = keras.Model(extracted.inputs_struct, extracted.outputs_struct, name=name)
    if optimizer is not None:
        plain.compile(optimizer, auto_scale_loss=False)  # which has been done where it should be
    return plain


def config_of(model: keras.Model, compile_config: dict[str, Any] | None) -> dict[str, Any]:
    """Describes the wrapped model, so that plain Keras makes one of its class."""
    config: dict[str, Any] = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    if compile_config:
        config["compile_config"] = compile_config
    return config


def write_plain(
    extracted: ExtractedModel, config: dict[str, Any], optimizer: Any, path: Path
) -> None:
    """Writes a `.keras` file that stock Keras loads and trains on."""
    metadata = {
        "keras_version": keras.__version__,
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA, json.dumps(metadata))
        archive.writestr(CONFIG, json.dumps(config))
        save_state(plain_model(extracted, optimizer), archive, path.with_name(WEIGHTS), rows_of)
