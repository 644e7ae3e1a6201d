"""Weights, optimizer state and assets of a file, of which each rank reads what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, StaleWeightError
from tarantella_pp.keras_internals.model_files import load_state
from tarantella_pp.keras_internals.training import layers_in
from tarantella_pp.models.files.keras_file import KerasFile
from tarantella_pp.runtime.state.remote_variables import let_go, only_own_assigned


def read_state(file: KerasFile, plain: keras.Model, needed: Iterable[Any]) -> None:
    """Takes over what a file has of this rank's share of a model.

    Args:
        file: The file.
        plain: A stock Keras model of the layers, with what takes over the optimizer's state.
        needed: The variables of this rank.

    Raises:
        ConfigurationError: If the file does not fit the model.
    """
    skipped = layers_of_others(plain, needed)
    with file.weights() as weights, file.assets() as assets, only_own_assigned():
        failed = load_state(plain, weights, assets, skipped)
    # What a layer makes of its weights is not needed where it does not run.
    failed = [(layer, why) for layer, why in failed if not isinstance(why, StaleWeightError)]
    if failed:
        layer, why = failed[0]
        more = f", and {len(failed) - 1} more do not" if len(failed) > 1 else ""
        raise ConfigurationError(
            f"{type(layer).__name__} '{layer.name}' does not find its state in file {file.name}"
            f"{more}: {why} The file was written of another model, or its classes have changed: "
            "save it again with the classes of today."
        )


def layers_of_others(model: keras.Model, needed: Iterable[Any]) -> list[Any]:
    """The layers of a model that need not be read on this rank; lets go what it has of them.

    A layer that keeps more than variables is read everywhere.

    Args:
        model: The model.
        needed: The variables of this rank.
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
