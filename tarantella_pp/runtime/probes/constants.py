"""Numbers that a model computes with and that are no weights: replicas must have the same."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

# Where it is, and what tells it from others.
Constant: TypeAlias = "tuple[Callable[[], str], float]"
_MANY = 1_000_000  # numbers that are looked at together


def constants_of(
    function: Any, place: Callable[[str], str] = str, held: Iterable[Any] | None = None
) -> Iterator[Constant]:
    """Kinds of a graph's operations, constants, and variables that are none of those held."""
    definition = function.graph.as_graph_def()
    yield from _constants(definition.node, place)
    bodies = (_constants(body.node_def, place) for body in definition.library.function)
    # The names of functions are any, and so is their order.
    for body in sorted(map(list, bodies), key=lambda found: [number for _, number in found]):
        yield from body
    variables = () if held is None else function.graph.variables
    own = {id(variable.value) for variable in held or ()}
    others = {id(variable.handle): variable for variable in variables if id(variable) not in own}
    for outer, inner in function.graph.captures:
        value = others.get(id(outer), outer)
        reader = next(iter(inner.consumers()), inner.op)
        where = functools.partial(place, reader.name)
        if value.dtype == tf.resource and reader.type == "LookupTableFindV2":
            yield where, _of_table(value, reader)
        elif value.dtype not in (tf.resource, tf.variant, tf.string):
            yield where, _measured(value.numpy())


def _constants(nodes: Iterable[Any], place: Callable[[str], str]) -> Iterator[Constant]:
    for node in nodes:
        where, proto = functools.partial(place, node.name), node.attr["value"].tensor
        options = sorted((name, _numbers(value)) for name, value in node.attr.items())
        yield where, float(zlib.crc32(repr([node.op, options]).encode()))
        if node.op == "Const" and proto.dtype != tf.string:
            yield where, _measured(tf.make_ndarray(proto))


def _numbers(option: Any) -> list[Any]:
    """The numbers among the values of an operation's option."""
    return [option.f, option.i, option.b, *option.list.f, *option.list.i]


def _of_table(table: Any, reader: Any) -> float:
    """A number that tells what a lookup table holds."""
    kinds = {"Tkeys": reader.get_attr("Tin"), "Tvalues": reader.get_attr("Tout")}
    found = tf.raw_ops.LookupTableExportV2(table_handle=table, **kinds)
    pairs = zip(found.keys.numpy().tolist(), found.values.numpy().tolist(), strict=True)
    return float(zlib.crc32(repr(sorted(pairs)).encode()))


def _measured(value: Any) -> float:
    """A number that is another one for other numbers; so large that rounding is small beside it."""
    flat, product, norm = np.ravel(value), 0j, 0.0
    for begin in range(0, flat.size, _MANY):
        some = flat[begin : begin + _MANY].astype(np.complex128)
        # What is not finite counts a few times the largest number that is, or nothing else would.
        top = 1 + float(np.abs(some[np.isfinite(some)]).max(initial=0.0))
        some = np.nan_to_num(some, nan=4 * top, posinf=2 * top, neginf=-2 * top)
        product += some @ np.cos(1.7 * np.arange(begin, begin + some.size) + 1)
        norm = math.hypot(norm, float(np.linalg.norm(some)))
    return float(product.real - product.imag + 3 * math.sqrt(flat.size) * norm)
