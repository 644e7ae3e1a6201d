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
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from tarantella_pp.errors import ConfigurationError

Array: TypeAlias = "np.ndarray[Any, Any]"
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_PART_BYTES = 4 << 20
_DTYPES = {code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in _CODES.items()}


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Array],
    pause: Callable[[float], object],
) -> tuple[int, str]:
    """Writes a file, and says how much it has after each part; returns its size and checksum."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise ConfigurationError(
                f"Variable '{name}' has dtype {dtype}, which a checkpoint cannot hold. "
                f"Expected one of {', '.join(_CODES)}."
            )
        begin, end = end, end + math.prod(shape) * _DTYPES[_CODES[dtype]].itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    found = hashlib.sha256()
    with path.open("wb") as file:
        start: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for part in itertools.chain(start, (_bytes_of(read(name)) for name in tensors)):
            for place in range(0, len(part), _PART_BYTES):
                piece = part[place : place + _PART_BYTES]
                file.write(piece)
                found.update(piece)
                pause(file.tell() / (8 + len(text) + end))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end, found.hexdigest()


def sha256_of(path: Path) -> str:
    """The checksum of a file as it is on the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TensorFile:
    """A file of tensors to read from, whose checksum is right."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.slots: dict[str, Any] = json.loads(file.read(length))  # its header
        self._start = 8 + length

    def read(self, name: str) -> Array:
        """Reads one tensor."""
        slot = self.slots[name]
        begin, end = slot["data_offsets"]
        data = np.fromfile(self._path, np.uint8, end - begin, offset=self._start + begin)
        return data.view(_DTYPES[slot["dtype"]]).reshape(slot["shape"])


def _bytes_of(value: Array) -> memoryview:
    """The bytes of a tensor, without a copy where there is none to make."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
