"""Whether an optimizer treats each weight by itself, found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tarantella_pp.runtime.probes.parts import ROWS, Array, kinds_of

_SHAPES = ((3, 4), (5,), (4, 2))
_STEPS = 3
_TOLERANCE = 1e-5


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
