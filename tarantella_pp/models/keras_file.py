"""A `.keras` file that is read where it is needed: no rank has all of it in memory.

config.json    model.weights.h5                        assets/vocabulary.txt ...
read at once   a view of the file from here to there   unpacked to a folder
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import json
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import keras

from tarantella_pp.errors import ConfigurationError, FileError, StaleWeightError
from tarantella_pp.internals import model_files
from tarantella_pp.internals.functional import sublayers
from tarantella_pp.internals.parted import in_parts
from tarantella_pp.runtime.comm.buffers import give_back
from tarantella_pp.runtime.weights.remote_variables import let_go, only_own_assigned
from tarantella_pp.runtime.weights.shared_weights import tensor_of

_MIB = 2**20
# As Keras refuses them: members that are small on the disk, and fill it when they are unpacked.
_LARGEST_BOMB, _MOST_EXPANSION = 256 * _MIB, 100


class KerasFile:
    """A whole model that Keras has saved, or one of its distributed models."""

    def __init__(self, filepath: Any) -> None:
        self.name = f"'{filepath}'"  # in errors
        with contextlib.ExitStack() as stack:
            try:
                self._file: Any = stack.enter_context(open(filepath, "rb"))
                self._zip = stack.enter_context(zipfile.ZipFile(self._file))
                self._check()
                self.config: dict[str, Any] = json.loads(self._zip.read(model_files.CONFIG))
            except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
                advice = "Each rank reads it: put it where all of them can."
                if not isinstance(error, OSError):
                    advice = "It is damaged, or no `.keras` file: copy it again, or save it again."
                reason = error.args[0] if isinstance(error, KeyError) else error
                text = f"File {self.name} cannot be loaded: {reason}. {advice}"
                raise ConfigurationError(text) from error
            self.close = stack.pop_all().close

    @property
    def contents(self) -> str:
        """A short text that is the same for files with the same model and weights."""
        kept = (model_files.CONFIG, model_files.WEIGHTS, f"{model_files.ASSETS}/")
        members = [m for m in self._zip.infolist() if m.filename.startswith(kept)]
        found = sorted((m.filename, m.file_size, m.CRC) for m in members)
        text = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
        return f"{sum(size for _, size, _ in found)} bytes, {text}"

    @contextlib.contextmanager
    def weights(self) -> Iterator[BinaryIO]:
        """The HDF5 file with weights and optimizer state."""
        member = self._zip.getinfo(model_files.WEIGHTS)
        if member.compress_type != zipfile.ZIP_STORED:
            # Going back in packed data means to unpack all before it again, for each tensor.
            with tempfile.TemporaryFile() as whole:
                with self._zip.open(member) as packed:
                    shutil.copyfileobj(packed, whole, _MIB)
                yield whole
            return
        self._file.seek(member.header_offset + 26)  # behind a header that ends with two texts
        lengths = self._file.read(4)
        name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
        start = member.header_offset + 30 + name + extra
        with io.BufferedReader(_Part(self._file, start, member.file_size)) as file:
            yield file

    @contextlib.contextmanager
    def assets(self) -> Iterator[Path | None]:
        """A folder with what layers keep in files of their own; `None` if they do not."""
        found = [name for name in self._zip.namelist() if name.startswith(f"{model_files.ASSETS}/")]
        with tempfile.TemporaryDirectory() as folder:
            self._zip.extractall(folder, found)
            yield Path(folder) / model_files.ASSETS if found else None

    def _check(self) -> None:
        """Reads all of it once, and refuses damaged or dangerous members."""
        for member in self._zip.infolist():
            packed = _MOST_EXPANSION * member.compress_size
            if member.file_size > max(_LARGEST_BOMB, packed):
                raise ValueError(f"{member.filename} is 100 times larger than its packed size")
        if model_files.WEIGHTS not in self._zip.namelist():
            raise KeyError(f"there is no {model_files.WEIGHTS} in it")
        if (damaged := self._zip.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")


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


def write_plain(plain: keras.Model, config: dict[str, Any], path: Path) -> None:
    """Writes a `.keras` file that stock Keras loads and trains on."""
    metadata = {
        "keras_version": keras.__version__,
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(model_files.METADATA, json.dumps(metadata))
        archive.writestr(model_files.CONFIG, json.dumps(config))
        model_files.save_state(plain, archive, path.with_name(model_files.WEIGHTS))


def read_state(file: KerasFile, plain: keras.Model, needed: Iterable[Any]) -> None:
    """Takes over what a whole model's file has of this rank's share of the model."""
    with file.weights() as weights, file.assets() as assets:
        _read(weights, assets, plain, needed, file.name)


def read_weights(
    path: Path, plain: keras.Model, needed: Iterable[Any], skip_mismatch: bool = False
) -> None:
    """Takes over what a file has of this rank's weights and optimizer state, and no assets."""
    with contextlib.ExitStack() as stack:
        weights: BinaryIO | Path = path
        if path.suffix == ".keras":
            file = KerasFile(path)
            stack.callback(file.close)
            weights = stack.enter_context(file.weights())
        try:
            if path.suffix == ".h5":
                weights = stack.enter_context(path.open("rb"))
            _read(weights, None, plain, needed, f"'{path}'", skip_mismatch)
        except OSError as error:
            raise FileError(
                f"File '{path}' cannot be read: {error}. Each rank reads it: put it where all of "
                "them can; if it is damaged, copy it again, or save it again."
            ) from error


def _read(
    weights: BinaryIO | Path,
    assets: Path | None,
    plain: keras.Model,
    needed: Iterable[Any],
    name: str,
    skip_mismatch: bool = False,
) -> None:
    skipped = layers_of_others(plain, needed)
    give_back()
    with only_own_assigned():
        failed = model_files.load_state(plain, weights, assets, skipped, tensor_of, skip_mismatch)
    give_back()
    # What a layer makes of its weights is not needed where it does not run.
    failed = [(layer, why) for layer, why in failed if not isinstance(why, StaleWeightError)]
    if not failed:
        return
    layer, why = failed[0]
    more = f", and {len(failed) - 1} more do not" if len(failed) > 1 else ""
    message = (
        f"{type(layer).__name__} '{layer.name}' does not find its state in file {name}{more}: "
        f"{why} The file was written of another model, or its classes have changed"
    )
    if not skip_mismatch:
        raise ConfigurationError(f"{message}: build that model, or save it again.")
    warnings.warn(f"{message}; it keeps what it has.", stacklevel=2)


def layers_of_others(model: keras.Model, needed: Iterable[Any]) -> list[Any]:
    """The layers of a model that need not be read on this rank; lets go what it has of them."""
    own = {id(variable) for variable in needed}
    found = []
    for layer in sublayers(model):
        variables = [] if layer is model else layer.variables
        parts = map(id, in_parts(variables))
        if variables and not own.intersection(parts) and _has_only_variables(layer):
            found.append(layer)
            for variable in variables:
                let_go(variable)
    return found


def _has_only_variables(layer: Any) -> bool:
    """Whether Keras' own code reads a layer and all in it, and nothing but variables."""
    return all(
        type(part).load_own_variables.__module__.startswith("keras.")
        and not hasattr(part, "load_assets")
        for part in sublayers(layer)
    )
