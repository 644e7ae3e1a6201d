"""Bytes that an optimizer keeps for each variable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import copied
from tarantella_pp.internals.state import name_by_path, outside_stateless_scopes
from tarantella_pp.partition.graph.layer_graph import Weight
from tarantella_pp.partition.graph.units import item_bytes

#: Sizes of the dimensions of the tiny variables: different primes, so that a slot's shape shows
#: which dimensions of its variable it has.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def optimizer_state_bytes(optimizer: Any, weights: Sequence[Weight]) -> tuple[int, ...]:
    """Returns the bytes of the optimizer's slots for each variable."""
    if optimizer is None:
        return tuple(2 * weight.bytes * weight.trainable for weight in weights)
    optimizer = optimizer_of(optimizer)
    by_path = "muon" in type(optimizer).__name__.lower()  # it treats embeddings by name
    slots_of: dict[tuple[Any, ...], list[tuple[tuple[int, ...], int]]] = {}
    result = []
    for weight in weights:
        if not weight.trainable:
            result.append(0)
            continue
        key = (len(weight.shape), weight.dtype, weight.name if by_path else "")
        if key not in slots_of:
            slots_of[key] = _slots(optimizer, weight)
        slots = [([weight.shape[dim] for dim in dims], size) for dims, size in slots_of[key]]
        result.append(sum(math.prod(shape) * size for shape, size in slots))
    return tuple(result)


def optimizer_name(optimizer: Any) -> str:
    """Returns how to call the optimizer that slots are counted for."""
    if optimizer is None:
        return "Adam (assumed)"
    return type(optimizer_of(optimizer)).__name__


def optimizer_of(optimizer: Any) -> Any:
    """Returns an optimizer that is given as such or by its name."""
    built = None
    with outside_stateless_scopes(), contextlib.suppress(ValueError, TypeError):
        built = keras.optimizers.get(optimizer)
    if isinstance(built, keras.optimizers.Optimizer):
        return built
    raise ConfigurationError(
        f"Expected a Keras optimizer, its name or None. Received: optimizer={optimizer!r}"
    )


def _slots(optimizer: Any, weight: Weight) -> list[tuple[tuple[int, ...], int]]:
    """The slots of variables of this rank: the dimensions that each has, and its item size."""
    shape = _PRIMES[: len(weight.shape)]
    with outside_stateless_scopes():
        optimizer = copied(optimizer)
        variable = keras.Variable(keras.ops.zeros(shape, weight.dtype), dtype=weight.dtype)
        name_by_path(variable, weight.name)
        optimizer.build([variable])
    return [
        (tuple(shape.index(size) for size in slot.shape), item_bytes(slot.dtype))
        for slot in optimizer.variables
        if len(slot.shape) > 0 and set(slot.shape) <= set(shape)  # not the step or learning rate
    ]
