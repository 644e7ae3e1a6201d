"""Files of a pipeline: those of the plain Keras model that it trains."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel

_CONFIG = "config.json"


def plain_model(extracted: ExtractedModel, optimizer: Any = None) -> keras.Model:
    """Makes a stock Keras model of the same layers, to save or to load.

    Args:
        extracted: The user's model.
        optimizer: The optimizer of the whole model, or `None`.
    """
    name = extracted.model.name
    plain = keras.Model(extracted.inputs_struct, extracted.outputs_struct, name=name)
    if optimizer is not None:
        plain.compile(optimizer, auto_scale_loss=False)  # which has been done where it should be
    return plain


def config_of(model: keras.Model, compile_config: dict[str, Any] | None) -> dict[str, Any]:
    """Describes the wrapped model, so that plain Keras makes one of its class.

    Args:
        model: The wrapped model.
        compile_config: What the pipeline was compiled with, or `None`.
    """
    config: dict[str, Any] = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    if compile_config:
        config["compile_config"] = compile_config
    return config


def write_plain(
    extracted: ExtractedModel, config: dict[str, Any], optimizer: Any, path: Path
) -> None:
    """Writes a `.keras` file that stock Keras loads and trains on.

    Args:
        extracted: The user's model, whose layers hold the current weights.
        config: What `config_of` returned.
        optimizer: The optimizer of the whole model, or `None`.
        path: Where to, in a folder of its own.
    """
    draft = path.with_name("draft.keras")
    plain_model(extracted, optimizer).save(draft)
    with zipfile.ZipFile(draft) as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            with new.open(member.filename, "w", force_zip64=True) as out:
                if member.filename == _CONFIG:
                    out.write(json.dumps(config).encode())
                else:
                    with old.open(member) as data:
                        shutil.copyfileobj(data, out)
