"""What all ranks hear of a batch before they get their parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tarantella_pp.errors import ConfigurationError
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
