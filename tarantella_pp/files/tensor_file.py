"""Files of tensors in the format of safetensors, written and read one tensor at a time.

    8 bytes    length of the header
    header     JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}
    tensors    one behind the other, little-endian, in C order

Shapes are known before values are, so the header comes first and no file is ever in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from tarantella_pp.errors import ConfigurationError, FileError

Array: TypeAlias = "np.ndarray[Any, Any]"
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_LONGEST_HEADER = 100 * 1024**2


class TensorSlot(NamedTuple):
    """Where a tensor is in a file."""

    dtype: str  # name of its NumPy dtype
    shape: tuple[int, ...]  # its shape
    begin: int  # its first byte behind the header
    end: int  # the byte after its last


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], Array]
) -> tuple[int, str]:
    """Writes a file; when it is on the disk, returns its size and its checksum."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise ConfigurationError(
                f"Variable '{name}' has dtype {dtype}, which a checkpoint cannot hold. "
                f"Expected one of {', '.join(_CODES)}."
            )
        begin, end = end, end + math.prod(shape) * _dtype(dtype).itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    found, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        values = (_bytes_of(read(name), *tensors[name]) for name in tensors)
        start = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
        for part in itertools.chain(start, values):
            file.write(part)
            found.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return size, found.hexdigest()


def sha256_of(path: Path) -> str:
    """The checksum of a file as it is on the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TensorFile:
    """A file of tensors to read from.

    Attributes:
        slots: What is in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _LONGEST_HEADER:
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
            self._start = 8 + length
            self.slots = {name: _slot(entry) for name, entry in header.items() if name[:2] != "__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"'{path}' is no file of tensors: {error}") from error

    def read(self, name: str) -> Array:
        """Reads one tensor."""
        slot = self.slots[name]
        with self._path.open("rb") as file:
            file.seek(self._start + slot.begin)
            data = np.fromfile(file, np.uint8, slot.end - slot.begin)
        if data.size != slot.end - slot.begin:
            raise FileError(f"'{self._path}' ends within tensor '{name}'.")
        return data.view(_dtype(slot.dtype)).reshape(slot.shape)


def _slot(entry: Mapping[str, Any]) -> TensorSlot:
    begin, end = entry["data_offsets"]
    slot = TensorSlot(_NAMES[entry["dtype"]], tuple(entry["shape"]), begin, end)
    if end - begin != math.prod(slot.shape) * _dtype(slot.dtype).itemsize:
        raise ValueError(f"{end - begin} bytes for {slot.dtype} of shape {slot.shape}")
    return slot


def _dtype(name: str) -> np.dtype[Any]:
    own = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    return own.newbyteorder("<") if own.kind in "iuf" else own


def _bytes_of(value: Array, dtype: str, shape: tuple[int, ...]) -> memoryview:
    """The bytes of a tensor, without a copy where there is none to make."""
    if value.shape != shape:
        raise ConfigurationError(f"Expected a value of shape {shape}. Received: {value.shape}")
    plain = np.ascontiguousarray(value, _dtype(dtype))
    return plain.reshape(-1).view(np.uint8).data
