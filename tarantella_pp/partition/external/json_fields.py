"""Fields of parsed JSON, checked one by one; every complaint names the place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tarantella_pp.errors import GraphError

_LARGEST = 1e200


def record(
    value: Any, where: str, known: frozenset[str] | None, needed: Sequence[str]
) -> dict[str, Any]:
    """Returns a JSON object that has what it needs, and nothing unknown.

    Args:
        value: What should be one.
        where: Its place, for the message.
        known: The fields that it may have; None: any.
        needed: Those that it must have.

    Raises:
        GraphError: It is none, or a field is unknown or missing.
    """
    if not isinstance(value, dict):
        raise GraphError(f"{where} is a JSON object. Received: {shown(value)}")
    unknown = sorted(set(value) - known) if known is not None else []
    if known and unknown:
        raise GraphError(
            f"{where} has an unknown field {unknown[0]!r}. Known: {', '.join(sorted(known))}"
        )
    for key in needed:
        if key not in value:
            raise GraphError(f"{where} lacks the field {key!r}.")
    return value


def items(value: Any, where: str) -> list[Any]:
    """Returns a JSON array.

    Args:
        value: What should be one.
        where: Its place, for the message.

    Raises:
        GraphError: It is none.
    """
    if not isinstance(value, list):
        raise GraphError(f"{where} is a JSON array. Received: {shown(value)}")
    return value


def index(value: Any, where: str, count: int) -> int:
    """Returns a whole number in 0..count - 1.

    Args:
        value: What should be one.
        where: Its place, for the message.
        count: Where it ends.

    Raises:
        GraphError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise GraphError(f"{where} is a whole number in 0..{count - 1}. Received: {shown(value)}")
    return value


def cost(value: Any, where: str) -> float:
    """Returns a finite number that is not negative.

    Args:
        value: What should be one.
        where: Its place, for the message.

    Raises:
        GraphError: It is none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= _LARGEST or math.isnan(value):
        raise GraphError(f"{where} is a finite number, not negative. Received: {shown(value)}")
    return float(value)


def text(value: Any, where: str) -> str:
    """Returns a string that can be written as UTF-8.

    Args:
        value: What should be one.
        where: Its place, for the message.

    Raises:
        GraphError: It is none.
    """
    # JSON can spell halves of surrogate pairs, which no encoding has.
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise GraphError(f"{where} is a string. Received: {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Returns a value in short, for messages.

    Args:
        value: Any value.
    """
    try:
        words = repr(value)
    except ValueError:
        # Whole numbers of thousands of digits have no decimal form.
        words = f"a {type(value).__name__}"
    return words if len(words) <= 80 else words[:77] + "..."


def no_constant(name: str) -> float:
    """Refuses NaN and Infinity, which Python's JSON reader would let pass.

    Args:
        name: How it is spelt.

    Raises:
        GraphError: Always.
    """
    raise GraphError(f"A cost is a finite number. Received: {name}")


def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object, and refuses one with the same field twice.

    Args:
        pairs: Its fields.

    Raises:
        GraphError: A field is there twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise GraphError(f"A JSON object has the field {twice!r} twice.")
    return fields
