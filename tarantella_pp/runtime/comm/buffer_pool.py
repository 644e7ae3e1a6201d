"""Memory that messages are received into: aligned, and used again once nobody looks at it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# TensorFlow takes over a foreign buffer without a copy only if it starts at such an address.
ALIGNMENT = 64
# Below this size the C library hands freed memory out again by itself; above, it maps fresh pages
# for every buffer, and faulting them in costs as much as the message itself.
SMALLEST_POOLED = 128 << 10
_PAGE = 4096


def aligned_memory(nbytes: int) -> Bytes:
    """Returns `nbytes` of fresh memory that starts at a multiple of `ALIGNMENT` bytes."""
    block: Bytes = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -block.__array_interface__["data"][0] % ALIGNMENT
    return block[offset : offset + nbytes]


class _Lease:
    """Owner of a block while arrays alias it; dies with the last of them, in whatever thread."""

    __slots__ = ("__array_interface__", "_block", "_returned")

    def __init__(self, block: Bytes, returned: deque[Bytes], nbytes: int) -> None:
        self._block = block
        self._returned = returned
        interface: dict[str, Any] = dict(block.__array_interface__)
        interface["shape"] = (nbytes,)
        self.__array_interface__ = interface

    def __del__(self) -> None:
        self._returned.append(self._block)


class BufferPool:
    """Hands out aligned memory and takes it back when the last array or tensor on it is gone.

    Memory is never handed out again while anything aliases it, a NumPy view or a TensorFlow
    tensor made through DLPack alike. The pool keeps no more free memory than was in use at once.
    """

    def __init__(self) -> None:
        # Blocks come home in the thread that dropped the last reference, at any moment: an append
        # to a deque is the one thing that is safe there. All else happens in `take`.
        self._returned: deque[Bytes] = deque()
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool keeps: in use, and to be used again."""
        return self._used_bytes + self._free_bytes

    def take(self, nbytes: int) -> Bytes:
        """Returns an array of `nbytes` bytes with any content; call it from one thread only."""
        if nbytes < SMALLEST_POOLED:
            return aligned_memory(nbytes)
        self._collect()
        size = -(-nbytes // _PAGE) * _PAGE
        blocks = self._free.get(size)
        if blocks:
            block = blocks.pop()
            self._free_bytes -= size
        else:
            block = aligned_memory(size)
        self._used_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return np.asarray(_Lease(block, self._returned, nbytes))

    def _collect(self) -> None:
        """Moves what came home to the free lists, and lets go of what is more than the peak."""
        while self._returned:
            block = self._returned.popleft()
            self._used_bytes -= block.size
            self._free_bytes += block.size
            self._free.setdefault(block.size, []).append(block)
        while self._free_bytes > self._peak_bytes:
            size = next(iter(self._free))
            blocks = self._free[size]
            if blocks:
                blocks.pop()
                self._free_bytes -= size
            if not blocks:
                del self._free[size]
