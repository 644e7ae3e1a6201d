"""Tensors as bytes, in pieces that every MPI takes, and memory that they are received into."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError

_Scalar = TypeVar("_Scalar", bound=np.generic)
Bytes = NDArray[np.uint8]

# TensorFlow takes over a foreign buffer without a copy only if it starts at such an address.
ALIGNMENT = 64
# Below this size the C library hands freed memory out again by itself; above, it maps fresh pages
# for every buffer, and faulting them in costs as much as the message itself.
SMALLEST_POOLED = 128 << 10
_PAGE = 4096
# MPI counts are 32-bit, and Open MPI refuses messages of 2 GiB and more.
LARGEST_PIECE = 1 << 30
# The description that goes ahead of the first message with a tag.
DESCRIPTION_BYTES = 512


def numpy_dtype(dtype: str | np.dtype[Any] | type[Any]) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name such as "float32", "bool" or "bfloat16"."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(dtype)))
        return extended


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor in a message."""

    # Static shape, rows of the micro-batch first; `()` for a scalar, zeros allowed
    shape: tuple[int, ...]
    # NumPy dtype or its name, "bfloat16" and the like included
    dtype: str | np.dtype[Any] | type[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        size = numpy_dtype(self.dtype).itemsize
        for length in self.shape:
            size *= length
        return size

    def __str__(self) -> str:
        return f"{numpy_dtype(self.dtype).name}[{','.join(map(str, self.shape))}]"


def as_array(value: Any) -> NDArray[Any]:
    """Returns a contiguous array on the memory of a tensor or array; copies only if it must."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            array = np.asarray(memoryview(value))
        except (TypeError, BufferError, ValueError):
            array = np.asarray(value)
    if array.dtype.hasobject:
        raise CommunicationError(
            "Only arrays of numbers can be sent between ranks. "
            f"Received: an array of dtype {array.dtype} and shape {array.shape}."
        )
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_bytes(array: NDArray[Any]) -> Bytes:
    """Returns the memory of a contiguous array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def pieces(flat: NDArray[_Scalar]) -> Iterator[NDArray[_Scalar]]:
    """Cuts a flat array into pieces of at most `LARGEST_PIECE` bytes; an empty one is one piece."""
    if flat.nbytes <= LARGEST_PIECE:
        yield flat
        return
    step = max(1, LARGEST_PIECE // flat.itemsize)
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def describe(tensors: Sequence[TensorSpec | NDArray[Any]]) -> Bytes:
    """Returns what a message holds as text in bytes: a digest of all of it, then its beginning."""
    text = " ".join(
        str(tensor if isinstance(tensor, TensorSpec) else TensorSpec(tensor.shape, tensor.dtype))
        for tensor in tensors
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return np.frombuffer(f"{digest} {text}".encode()[:DESCRIPTION_BYTES], np.uint8)


def description_text(description: Bytes) -> str:
    """Returns the readable part of what `describe` made."""
    return description.tobytes().decode(errors="replace").partition(" ")[2] or "no tensors"


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
        # Whole pages, so that tensors of nearly the same size share free blocks.
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
        """Moves what came home to the free lists, and lets go of any more than the peak."""
        while self._returned:
            block = self._returned.popleft()
            self._used_bytes -= block.size
            self._free_bytes += block.size
            self._free.setdefault(block.size, []).append(block)
        # More was never in use at once, so more is never needed.
        while self._free_bytes > self._peak_bytes:
            size = next(iter(self._free))
            blocks = self._free[size]
            if blocks:
                blocks.pop()
                self._free_bytes -= size
            if not blocks:
                del self._free[size]
