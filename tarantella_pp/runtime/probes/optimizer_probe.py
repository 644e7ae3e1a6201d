"""Whether an optimizer treats each weight by itself, found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SHAPES = ((3, 4), (5,), (4, 2))
_STEPS = 3


def treats_weights_apart(optimizer: Any) -> bool:
    """Tries whether steps for some weights, and steps for the others, are steps for all.

    Ranks update the weights of their own stages only. An optimizer that looks at all gradients at
    once, to clip them by their common norm, say, would do something else there. Made-up weights are
    trained by copies of the optimizer, which does not change.
    """
    together = _trained(optimizer, [range(len(_SHAPES))])
    apart = _trained(optimizer, [[place] for place in range(len(_SHAPES))])
    return all(
        np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(together, apart, strict=True)
    )


def _trained(optimizer: Any, groups: Sequence[Sequence[int]]) -> list[Array]:
    """What made-up weights become that a copy of the optimizer trains group by group."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape) for shape in _SHAPES]
    gradients = [10.0 * rng.normal(size=(_STEPS, *shape)) for shape in _SHAPES]
    weights = [keras.Variable(value) for value in values]
    for group in groups:
        copy = type(optimizer).from_config(optimizer.get_config())
        chosen = [weights[place] for place in group]
        copy.build(chosen)
        for step in range(_STEPS):
            given = [gradients[place][step].astype(weights[place].dtype) for place in group]
            copy.apply(list(map(keras.ops.convert_to_tensor, given)), chosen)
    return [weight.numpy() for weight in weights]
