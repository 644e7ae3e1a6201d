"""Tensors as bytes, in pieces that every MPI takes, and memory that they are received into.

The C library hands large blocks out again, and need not map fresh pages: see `allocator_variables`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 - by which NumPy knows "bfloat16" and the like
import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError

_Scalar = TypeVar("_Scalar", bound=np.generic)
Bytes = NDArray[np.uint8]

# TensorFlow takes over a foreign buffer without a copy only if it starts at such an address.
ALIGNMENT = 64
# MPI counts are 32-bit, and Open MPI refuses messages of 2 GiB and more.
LARGEST_PIECE = 1 << 30
# Bytes that are worth giving back to the system.
_LARGE = 1 << 22
_LIBRARY = ctypes.CDLL(None)


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
        return math.prod(self.shape, start=np.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype).name}[{','.join(map(str, self.shape))}]"


def as_array(value: Any) -> NDArray[Any]:
    """Returns a contiguous array on the memory of an array; copies only if it must."""
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


def aligned_memory(nbytes: int) -> Bytes:
    """Returns `nbytes` of fresh memory that starts at a multiple of `ALIGNMENT` bytes."""
    block: Bytes = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -block.__array_interface__["data"][0] % ALIGNMENT
    return block[offset : offset + nbytes]


def empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Returns an array with any content on memory as messages are received into."""
    spec = TensorSpec(shape, dtype)
    return aligned_memory(spec.nbytes).view(np.dtype(spec.dtype)).reshape(shape)


def give_back(freed: int = _LARGE) -> None:
    """Gives memory that was freed back to the system, if it is worth the time."""
    # only glibc has it
    if freed >= _LARGE and (trim := getattr(_LIBRARY, "malloc_trim", None)) is not None:
        trim(0)
