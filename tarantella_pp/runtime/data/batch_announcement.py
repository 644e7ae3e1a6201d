"""What all ranks hear of a batch before they get their parts: rows, and structures as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

READER = 0
END = -1
_FAILED = -2
_HEADER_TAG, _STRUCTURE_TAG = 1, 2


class BatchAnnouncement:
    """Tells every rank the size of the next batch, and its structure where that is new.

    Attributes:
        known: Names the structure of the last batch.
        signature: The same, decoded: shapes and dtypes of inputs, structures of targets.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.known = b""
        self.signature: Any = None

    def announce(self, rows: int, signature: bytes = b"") -> None:
        """Says, on the reader, what comes next."""
        self._tell(rows, signature if signature != self.known else b"")
        if rows >= 0:
            self.keep(signature)

    def fail(self, text: str) -> None:
        """Says, on the reader, that the data could not be read."""
        self._tell(_FAILED, text.encode())

    def hear(self) -> int:
        """Returns, elsewhere, the number of samples in the next batch; or `END`."""
        rows, size = self._get((2,), np.int64, _HEADER_TAG).tolist()
        if size:
            news = self._get((size,), np.uint8, _STRUCTURE_TAG).tobytes()
            if rows == _FAILED:
                raise ConfigurationError(news.decode())
            self.keep(news)
        return int(rows)

    def _tell(self, rows: int, news: bytes) -> None:
        header, text = np.array([rows, len(news)], np.int64), np.frombuffer(news, np.uint8)
        for rank in range(self._communicator.size):
            if rank != self._communicator.rank:
                self._communicator.send([header], rank, _HEADER_TAG, label="batch header")
                if news:
                    self._communicator.send([text], rank, _STRUCTURE_TAG, label="batch structure")

    def keep(self, signature: bytes) -> None:
        """Remembers the structure of the last batch."""
        if signature != self.known:
            self.known, self.signature = signature, msgspec.msgpack.decode(signature)

    def _get(self, shape: Sequence[int], dtype: Any, tag: int) -> np.ndarray[Any, Any]:
        spec = TensorSpec(tuple(shape), np.dtype(dtype))
        return self._communicator.post_receive([spec], READER, tag, label="data").wait()[0]


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
