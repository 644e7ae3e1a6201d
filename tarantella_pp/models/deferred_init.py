"""Models without weights, until it is known which rank needs which."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.state import (
    given_values_kept,
    initializer_of,
    variables_without_values,
)
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.weights.remote_variables import make_deferred

# Layers in a row that Keras, which finds its way through a model by recursion, may meet.
DEEPEST = 100_000


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Lets models be built that have shapes and initializers, but no weights yet.

    Wrap them in a `PipelineModel`: each rank makes the weights of its own stages then, with the
    bits that they would have had. So a model may be larger than the memory of any rank. A
    `PipelineModel` of a function that builds a model does all of this by itself.

    All ranks must enter it together. They go on with the random state of rank 0, and Keras draws
    the seeds of initializers from it. Compile the model, and load or set weights, after it was
    wrapped.

    Raises:
        ConfigurationError: If weights are set or an optimizer is made inside, which would be lost.
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
        with variables_without_values(made) as assigned:
            yield
    except ValueError as error:
        if "stateless scope" not in str(error):
            raise
        raise ConfigurationError(
            "Under `deferred_init()` variables have no values, so none can be made of values: "
            "optimizers, and layers that pass arrays to `keras.Variable`. Compile the model "
            "after it was wrapped, and use `add_weight` with an initializer."
        ) from error
    finally:
        for variable in made:
            make_deferred(variable)
    lost = [variable.path for variable in made if id(variable) in assigned]
    if lost:
        raise ConfigurationError(
            f"Weights were set under `deferred_init()`, where they have no memory: {lost[:5]}. Set "
            "or load them after the model was wrapped in a PipelineModel."
        )
    for variable in made:
        _check_initializer(variable)


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Lets models be built that are to be planned only: no values but those that are given."""
    made: list[Any] = []
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST))
    try:
        with given_values_kept(), variables_without_values(made):
            yield
    finally:
        sys.setrecursionlimit(limit)
        for variable in made:
            make_deferred(variable)


def described_model(config: dict[str, Any]) -> Any:
    """Makes the model that the configuration in a `.keras` file describes, not compiled."""
    from tarantella_pp.internals.model_files import deserialized

    return deserialized({**config, "compile_config": None})


def initial_values(model: keras.Model) -> str:
    """Describes what the weights without values begin with, the same if they begin alike."""
    found = (_described(initializer_of(variable)) for variable in model.variables)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _described(initializer: Any) -> str:
    if isinstance(initializer, keras.initializers.Initializer):
        return json.dumps(keras.saving.serialize_keras_object(initializer), sort_keys=True)
    return getattr(initializer, "__qualname__", "")


def _check_initializer(variable: Any) -> None:
    """Refuses what may give another value on another rank, or at another time."""
    initializer = initializer_of(variable)
    kind = initializer if hasattr(initializer, "__qualname__") else type(initializer)
    if not kind.__module__.startswith("keras."):
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
