"""A `.keras` file that is read where it is needed: no rank has all of it in memory.

config.json    model.weights.h5                        assets/vocabulary.txt ...
read at once   a view of the file from here to there   unpacked to a folder
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.model_files import ASSETS, CONFIG, WEIGHTS

_MIB = 2**20
# As Keras refuses them: members that are small on the disk, and fill it when they are unpacked.
_LARGEST_BOMB, _MOST_EXPANSION = 256 * _MIB, 100


class KerasFile:
    """A whole model that Keras has saved, or one of its distributed models.

    Attributes:
        name: What to call it in errors.
        config: The description of the model, its compilation included.
    """

    def __init__(self, filepath: Any) -> None:
        opened = isinstance(filepath, io.IOBase)
        self.name = f"an open {type(filepath).__name__}" if opened else f"'{filepath}'"
        self._folder = None if opened else Path(os.path.realpath(filepath)).parent
        with contextlib.ExitStack() as stack:
            try:
                self._file: Any = filepath if opened else stack.enter_context(_open(filepath))
                self._zip = stack.enter_context(zipfile.ZipFile(self._file))
                self._check()
                self.config: dict[str, Any] = json.loads(self._zip.read(CONFIG))
            except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
                raise self._error(error) from error
            self._opened = stack.pop_all()

    @property
    def contents(self) -> str:
        """A short text that is the same for files with the same model and weights."""
        kept = (CONFIG, WEIGHTS, f"{ASSETS}/")
        members = [m for m in self._zip.infolist() if m.filename.startswith(kept)]
        found = sorted((m.filename, m.file_size, m.CRC) for m in members)
        text = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
        return f"{sum(size for _, size, _ in found)} bytes, {text}"

    @contextlib.contextmanager
    def weights(self) -> Iterator[BinaryIO]:
        """The HDF5 file with weights and optimizer state."""
        member = self._zip.getinfo(WEIGHTS)
        if member.compress_type == zipfile.ZIP_STORED:
            with io.BufferedReader(
                _Part(self._file, self._start(member), member.file_size)
            ) as file:
                yield file
        else:
            with self._scratch_file() as file:
                with self._zip.open(member) as data:
                    shutil.copyfileobj(data, file, _MIB)
                yield file

    @contextlib.contextmanager
    def assets(self) -> Iterator[Path | None]:
        """A folder with what layers keep in files of their own; `None` if they do not."""
        found = [name for name in self._zip.namelist() if name.startswith(f"{ASSETS}/")]
        with tempfile.TemporaryDirectory() as folder:
            self._zip.extractall(folder, found)
            yield Path(folder) / ASSETS if found else None

    def close(self) -> None:
        """Closes it; an open file that was given stays open."""
        self._opened.close()

    def _check(self) -> None:
        """Reads all of it once, and refuses damaged or dangerous members."""
        for member in self._zip.infolist():
            packed = _MOST_EXPANSION * member.compress_size
            if member.file_size > max(_LARGEST_BOMB, packed):
                raise ValueError(f"{member.filename} is 100 times larger than its packed size")
        if WEIGHTS not in self._zip.namelist():
            raise KeyError(f"there is no {WEIGHTS} in it")
        damaged = self._zip.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")

    def _start(self, member: zipfile.ZipInfo) -> int:
        """Where a member begins, behind a header that ends with two texts."""
        self._file.seek(member.header_offset + 26)
        lengths = self._file.read(4)
        name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
        return member.header_offset + 30 + name + extra

    def _scratch_file(self) -> BinaryIO:
        """A file without a name, beside this one or where the system has its own."""
        try:
            return cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))
        except OSError:
            return cast(BinaryIO, tempfile.TemporaryFile())

    def _error(self, error: Exception) -> ConfigurationError:
        if isinstance(error, OSError):
            advice = "Each rank reads it: put it where all of them can."
        else:
            advice = "It is damaged, or no `.keras` file: copy it again, or save it again."
        reason = error.args[0] if isinstance(error, KeyError) else error
        return ConfigurationError(f"File {self.name} cannot be loaded: {reason}. {advice}")


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes elsewhere."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = origin[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads into the memory of somebody else."""
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self._file.seek(self._start + self._position)
        count = int(self._file.readinto(into))
        self._position += count
        return count


def _open(filepath: Any) -> BinaryIO:
    return Path(filepath).open("rb")
