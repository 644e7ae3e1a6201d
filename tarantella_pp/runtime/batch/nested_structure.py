"""Nested structures of tensors as plain data, so that other ranks can rebuild them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tarantella_pp.errors import UnsupportedModelError


def describe(value: Any) -> tuple[Any, list[Any]]:
    """Takes a nested structure apart."""
    leaves: list[Any] = []
    return _describe(value, leaves), leaves


def rebuild(description: Any, leaves: Sequence[Any]) -> Any:
    """Puts a structure together again; undoes `describe`."""
    return _rebuild(description, iter(leaves))


def _describe(value: Any, leaves: list[Any]) -> Any:
    if value is None:
        return ["none"]
    if isinstance(value, dict):
        return ["dict", [[key, _describe(item, leaves)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(item, leaves) for item in value]]
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or len(value.shape) == 0:
        raise UnsupportedModelError(
            "Targets and sample weights must be dense tensors with a batch dimension. "
            f"Received: {type(value).__name__}"
        )
    leaves.append(value)
    return ["tensor", [None, *value.shape[1:]], value.dtype.name]


def _rebuild(description: Any, leaves: Any) -> Any:
    kind, *rest = description
    if kind == "none":
        return None
    if kind == "tensor":
        return next(leaves)
    if kind == "dict":
        return {key: _rebuild(item, leaves) for key, item in rest[0]}
    items = [_rebuild(item, leaves) for item in rest[0]]
    return items if kind == "list" else tuple(items)


def tensors_in(description: Any) -> list[tuple[list[int | None], str]]:
    """Shape and dtype of each tensor of a description, in order."""
    kind, *rest = description
    if kind == "tensor":
        return [(rest[0], rest[1])]
    if kind == "none":
        return []
    items = [item for _, item in rest[0]] if kind == "dict" else rest[0]
    return [found for item in items for found in tensors_in(item)]
