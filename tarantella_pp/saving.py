"""Saves a pipeline as the plain Keras model that it trains."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.partition.extraction import ExtractedModel

_CONFIG = "config.json"


def save_plain(
    extracted: ExtractedModel, compile_config: dict[str, Any] | None, optimizer: Any, path: Path
) -> None:
    """Writes a `.keras` file that stock Keras loads and trains on.

    The file appears under its name only when it is complete.

    Args:
        extracted: The user's model, whose layers hold the current weights.
        compile_config: What the pipeline was compiled with; `None` for a file without it.
        optimizer: The optimizer of the whole model, or `None`.
        path: Where to.
    """
    model = extracted.model
    plain = keras.Model(extracted.inputs_struct, extracted.outputs_struct, name=model.name)
    if compile_config is not None and optimizer is not None:
        plain.compile(optimizer)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        draft = folder / "draft.keras"
        plain.save(draft)
        final = folder / path.name
        _replace_config(draft, final, _config_of(model, compile_config))
        os.replace(final, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config_of(model: Any, compile_config: dict[str, Any] | None) -> str:
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    if compile_config is not None:
        config["compile_config"] = compile_config
    return json.dumps(config)


def _replace_config(source: Path, target: Path, config: str) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.infolist():
            with new.open(member.filename, "w", force_zip64=True) as out:
                if member.filename == _CONFIG:
                    out.write(config.encode())
                else:
                    with old.open(member) as data:
                        shutil.copyfileobj(data, out)
