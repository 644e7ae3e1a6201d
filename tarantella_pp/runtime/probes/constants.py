"""Numbers that a model computes with and that are no weights: replicas must have the same."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

Constant: TypeAlias = (
    "tuple[Callable[[], str], float]"  # where it is, and what tells it from others
)
_MANY = 1_000_000  # numbers that are looked at together


def constants_of(
    function: Any, place: Callable[[str], str] = str, held: Iterable[Any] | None = None
) -> Iterator[Constant]:
    """Kinds of a graph's operations, constants, and variables that are none of those held."""
    definition = function.graph.as_graph_def()
    bodies = [body.node_def for body in definition.library.function]  # their names are any
    for nodes in (definition.node, *sorted(bodies, key=lambda nodes: [node.op for node in nodes])):
        for node in nodes:
            where, proto = functools.partial(place, node.name), node.attr["value"].tensor
            yield where, float(zlib.crc32(node.op.encode()))
            if node.op == "Const" and proto.dtype != tf.string:
                yield where, _measured(tf.make_ndarray(proto))
    variables = () if held is None else function.graph.variables
    own = {id(variable.value) for variable in held or ()}
    others = {id(variable.handle): variable for variable in variables if id(variable) not in own}
    for outer, inner in function.graph.captures:
        value = others.get(id(outer), outer)
        if value.dtype not in (tf.resource, tf.variant, tf.string):
            reader = next(iter(inner.consumers()), inner.op)
            yield functools.partial(place, reader.name), _measured(value.numpy())


def _measured(value: Any) -> float:
    """A number that is another one for other numbers; so large that rounding is small beside it."""
    flat, product, squares = np.ravel(value), 0j, 0.0
    for begin in range(0, flat.size, _MANY):
        some = flat[begin : begin + _MANY].astype(np.complex128)
        product += some @ np.cos(1.7 * np.arange(begin, begin + some.size) + 1)
        squares += float(np.linalg.norm(some)) ** 2
    return float(product.real - product.imag + 3 * np.sqrt(flat.size * squares))
