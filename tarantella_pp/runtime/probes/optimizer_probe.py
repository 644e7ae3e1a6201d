"""Whether an optimizer treats each weight by itself, as ranks need it: found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import delegates_of, is_keras_optimizer, wrapped_in
from tarantella_pp.runtime.probes.parts import ROWS, Array, kinds_of

_SHAPES = ((3, 4), (5,), (4, 2))
_STEPS = 3
_TOLERANCE = 1e-5


def check_division(optimizer: Any, weights: Sequence[Any], num_ranks: int) -> None:
    """Refuses optimizers that would do something else on several ranks than on one."""
    if optimizer is None or num_ranks == 1:
        return
    delegates = delegates_of(wrapped_in(optimizer), weights)
    for part in dict.fromkeys([optimizer, wrapped_in(optimizer), *delegates]):
        _check_own_optimizer(part, num_ranks)
        if part in delegates and part.global_clipnorm:
            raise ConfigurationError(
                f"Optimizer {part.name} in {wrapped_in(optimizer).name} clips the gradients of "
                f"some weights by their common norm, and they are on {num_ranks} ranks. Received: "
                f"global_clipnorm={part.global_clipnorm} of an optimizer in a MultiOptimizer. Use "
                "clipnorm, which clips each by itself, or run all stages in one process."
            )


def _check_own_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuses optimizers of the user's that look at all gradients at once."""
    if is_keras_optimizer(optimizer):
        return
    name = type(optimizer).__name__
    try:
        apart = treats_weights_apart(optimizer)
    except Exception as error:  # whatever a class of the user's may raise
        raise ConfigurationError(
            f"Optimizer {name} cannot be tried out with other weights ({type(error).__name__}: "
            f"{error}), and the weights are on {num_ranks} ranks. Make `get_config` return what "
            "its __init__ takes, or run all stages in one process."
        ) from error
    if not apart:
        raise ConfigurationError(
            f"Optimizer {name} looks at several weights at once, which are on {num_ranks} ranks. "
            "Treat each weight by itself, or run all stages in one process."
        )


def treats_weights_apart(optimizer: Any) -> bool:
    """Tries whether steps for some weights, and steps for the others, are steps for all.

    Ranks update the weights of their own stages only. An optimizer that looks at all gradients at
    once, to clip them by their common norm, say, would do something else there. Made-up weights are
    trained by copies of the optimizer, which does not change.
    """
    places = range(len(_SHAPES))
    parts = [_trained(optimizer, [place]) for place in places]
    shares = [1 / len(parts)] * len(parts)
    return ROWS in kinds_of(0.0, _trained(optimizer, places), parts, shares, _TOLERANCE)


def _trained(optimizer: Any, places: Sequence[int]) -> Array:
    """What some made-up weights become that a copy of the optimizer trains."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape) for shape in _SHAPES]
    gradients = [10.0 * rng.normal(size=(_STEPS, *shape)) for shape in _SHAPES]
    weights = [keras.Variable(values[place]) for place in places]
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(weights)
    for step in range(_STEPS):
        copy.apply(
            [keras.ops.convert_to_tensor(gradients[i][step], weights[0].dtype) for i in places],
            weights,
        )
    return np.concatenate([np.ravel(weight.numpy()) for weight in weights])
