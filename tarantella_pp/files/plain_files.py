"""Files of a pipeline are files of the plain Keras model that it trains."""

from __future__ import annotations

import contextlib
import datetime
import json
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import keras

from tarantella_pp.errors import ConfigurationError, FileError, StaleWeightError
from tarantella_pp.files.keras_file import KerasFile
from tarantella_pp.internals.model_files import (
    CONFIG,
    METADATA,
    WEIGHTS,
    load_state,
    save_state,
)
from tarantella_pp.internals.training import layers_in
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.weights.remote_variables import let_go, only_own_assigned, rows_of
from tarantella_pp.runtime.weights.value_stream import array_of, give_back


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


def read_state(file: KerasFile, plain: keras.Model, needed: Iterable[Any]) -> None:
    """Takes over what a whole model's file has of this rank's share of the model."""
    with file.weights() as weights, file.assets() as assets:
        _read(weights, assets, plain, needed, file.name)


def read_weights(
    path: Path, plain: keras.Model, needed: Iterable[Any], skip_mismatch: bool = False
) -> None:
    """Takes over what a file has of this rank's weights and optimizer state, and no assets."""
    with contextlib.ExitStack() as stack:
        weights: BinaryIO | Path = path
        if path.suffix == ".keras":
            file = KerasFile(path)
            stack.callback(file.close)
            weights = stack.enter_context(file.weights())
        try:
            if path.suffix == ".h5":
                weights = stack.enter_context(path.open("rb"))
            _read(weights, None, plain, needed, f"'{path}'", skip_mismatch)
        except OSError as error:
            raise FileError(
                f"File '{path}' cannot be read: {error}. Each rank reads it: put it where all of "
                "them can; if it is damaged, copy it again, or save it again."
            ) from error


def has_optimizer(path: Path) -> bool:
    """Whether a `.keras` or `.weights.h5` file has the state of an optimizer."""
    with contextlib.ExitStack() as stack:
        weights: Any = path
        if path.suffix == ".keras":
            weights = stack.enter_context(
                stack.enter_context(contextlib.closing(KerasFile(path))).weights()
            )
        try:
            return "optimizer" in stack.enter_context(h5py.File(weights, "r"))
        except OSError as error:
            raise FileError(f"File '{path}' cannot be read: {error}.") from error


def _read(
    weights: BinaryIO | Path,
    assets: Path | None,
    plain: keras.Model,
    needed: Iterable[Any],
    name: str,
    skip_mismatch: bool = False,
) -> None:
    skipped = layers_of_others(plain, needed)
    give_back()
    with only_own_assigned():
        failed = load_state(plain, weights, assets, skipped, array_of, skip_mismatch)
    give_back()
    # What a layer makes of its weights is not needed where it does not run.
    failed = [(layer, why) for layer, why in failed if not isinstance(why, StaleWeightError)]
    if not failed:
        return
    layer, why = failed[0]
    more = f", and {len(failed) - 1} more do not" if len(failed) > 1 else ""
    message = (
        f"{type(layer).__name__} '{layer.name}' does not find its state in file {name}{more}: "
        f"{why} The file was written of another model, or its classes have changed"
    )
    if not skip_mismatch:
        raise ConfigurationError(f"{message}: build that model, or save it again.")
    warnings.warn(f"{message}; it keeps what it has.", stacklevel=2)


def layers_of_others(model: keras.Model, needed: Iterable[Any]) -> list[Any]:
    """The layers of a model that need not be read on this rank; lets go what it has of them.

    A layer that keeps more than variables is read everywhere.
    """
    own = {id(variable) for variable in needed}
    found = []
    for layer in layers_in(model):
        variables = [] if layer is model else layer.variables
        if variables and not own.intersection(map(id, variables)) and _has_only_variables(layer):
            found.append(layer)
            for variable in variables:
                let_go(variable)
    return found


def _has_only_variables(layer: Any) -> bool:
    """Whether Keras' own code reads a layer and all in it, and nothing but variables."""
    return all(
        type(part).load_own_variables.__module__.startswith("keras.")
        and not hasattr(part, "load_assets")
        for part in layers_in(layer)
    )
