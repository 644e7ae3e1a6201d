"""Models without weights, until it is known which rank needs which."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.model_files import StoredValue, deserialized, values_read_later
from tarantella_pp.internals.state import (
    given_values_kept,
    initializer_of,
    variables_without_values,
)
from tarantella_pp.runtime.comm.collective import contents_of
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.weights import remote_variables

# Layers in a row that Keras, which finds its way through a model by recursion, may meet.
DEEPEST = 100_000
# Numbers in what is no weight: seeds and meters, which may belong to no layer.
SEED = 2
_SMALL: list[Any] = []  # such variables of models that are not wrapped yet


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Lets models be built that have shapes and initializers, but no weights yet.

    Wrap them in a `PipelineModel`: each rank makes the weights of its own stages then, with the
    bits that they would have had. So a model may be larger than the memory of any rank. A
    `PipelineModel` of a function that builds a model does all of this by itself.

    Weights that are loaded inside from a file of Keras on the disk (`load_weights`, or
    `from_preset` of KerasHub for a local folder) are read by each rank for its own stages, when the
    model is wrapped.

    All ranks must enter it together. They go on with the random state of rank 0, and Keras draws
    the seeds of initializers from it.

    Raises:
        ConfigurationError: If weights are set inside to values in memory, which would be lost.
        UnsupportedModelError: If a weight begins with what Keras does not know how to make again.

    Example::

        with tnt.deferred_init():
            model = build()
        model = tnt.PipelineModel(model, num_stages=4)
    """
    ranks = world()
    with ranks.call("deferred_init"):
        version, numbers, gauss = ranks.broadcast_json(random.getstate())
    random.setstate((version, tuple(numbers), gauss))
    made: list[Any] = []
    try:
        with given_values_kept(), values_read_later(), variables_without_values(made) as assigned:
            yield
    finally:
        for variable in made:
            remote_variables.make_deferred(variable)
    if lost := [variable.path for variable in made if id(variable) in assigned]:
        raise ConfigurationError(
            f"Weights were set under `deferred_init()`, where they have no memory: {lost[:5]}. "
            "Load them from a file that `save_weights` wrote on the disk, or set them after the "
            "model was wrapped in a PipelineModel."
        )
    for variable in made:
        _check_initializer(variable)
    _SMALL.extend(variable for variable in made if math.prod(variable.shape) <= SEED)


def initialize_beside(model: keras.Model) -> None:
    """Gives seeds and meters that belong to none of a model's layers their values."""
    weights = {id(variable) for variable in model.variables}
    for variable in _SMALL:
        if id(variable) not in weights and remote_variables.is_stale(variable):
            remote_variables.initialize_deferred(variable)
    _SMALL.clear()


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Lets models be built that are to be planned only: no values but those that are given."""
    made: list[Any] = []
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST))
    try:
        with given_values_kept(), values_read_later(), variables_without_values(made):
            yield
    finally:
        sys.setrecursionlimit(limit)
        for variable in made:
            remote_variables.make_deferred(variable)


def described_model(config: dict[str, Any]) -> Any:
    """Makes the model that the configuration in a `.keras` file describes, not compiled."""
    return deserialized({**config, "compile_config": None})


def initial_values(model: keras.Model) -> str:
    """Describes what the weights without values begin with, the same if they begin alike."""
    found = (_described(initializer_of(variable)) for variable in model.variables)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _described(initializer: Any) -> str:
    if isinstance(initializer, StoredValue):
        return f"{initializer.name} of {_contents(initializer.path)}"
    if isinstance(initializer, keras.initializers.Initializer):
        return json.dumps(keras.saving.serialize_keras_object(initializer), sort_keys=True)
    return getattr(initializer, "__qualname__", "")


_contents = functools.lru_cache(maxsize=None)(contents_of)  # of files with many weights


def _check_initializer(variable: Any) -> None:
    """Refuses what may give another value on another rank, or at another time."""
    initializer = initializer_of(variable)
    kind = initializer if hasattr(initializer, "__qualname__") else type(initializer)
    if not kind.__module__.startswith(("keras.", StoredValue.__module__)):
        raise UnsupportedModelError(
            f"Weight '{variable.path}' begins with what {kind.__qualname__} gives, of which Keras "
            "does not know whether it gives the same on every rank. Use an initializer of Keras, "
            "or build the model without `deferred_init()`."
        )
    if isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
        raise UnsupportedModelError(
            f"Weight '{variable.path}' begins with numbers of a SeedGenerator, which gives others "
            "each time. Give its initializer a number as its seed."
        )
