"""The folder of a run's checkpoints: how a new one comes there, old ones go, what each says.

DIRECTORY/step-00000120/                 files of tensors, and the manifest, written last
DIRECTORY/.writing-step-00000130.5f1c/   one that is being written; a job that begins removes it
DIRECTORY/.replaced-step-00000120/       one that is being replaced; that job removes it, too
DIRECTORY/.removed-step-00000110/        one that is being removed: half of one has no name

A directory belongs to one job at a time. No lock says so, for over a network a lock
can outlive its host. A job notices, before it writes, what it has neither found nor written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from tarantella_pp.errors import ConfigurationError, FileError, FormatError
from tarantella_pp.files import sync

_NAME = re.compile(r"step-(\d{8,})")
# What the name of one begins with that is being written, replaced or removed.
DRAFT, REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"


def name_of_step(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in a directory that are complete, the newest first; damaged ones, too."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def put_back(directory: Path) -> None:
    """Gives a checkpoint its name again if a kill came before another had taken its place."""
    for replaced in directory.glob(f"{REPLACED}*"):
        target = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if not target.exists():
            os.replace(replaced, target)


def remove_leftovers(directory: Path) -> None:
    """Makes the directory, and removes what a kill has left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for kind in (DRAFT, REPLACED, _REMOVED):
        for left in directory.glob(f"{kind}*"):
            shutil.rmtree(left)


def begin_draft(directory: Path, step: int, known: Collection[str]) -> Path:
    """Makes an empty folder for a new checkpoint."""
    there = [path.name for path in (*directory.glob(f"{DRAFT}*"), *checkpoints_in(directory))]
    if strange := [name for name in there if name not in known]:
        raise ConfigurationError(
            f"another job writes to this directory, too: it has '{strange[0]}', which is not of "
            "this one. End one of the two, or give it a directory of its own"
        )
    # A name that no other job gives, so that none writes into it or removes it by mistake.
    draft = directory / f"{DRAFT}{name_of_step(step)}.{secrets.token_hex(4)}"
    draft.mkdir()
    return draft


def publish(draft: Path, manifest: bytes) -> None:
    """Writes the manifest, and gives a checkpoint its name once all of it is on the disk."""
    for name, data in ((MANIFEST, manifest), (CHECKSUM, checksum_of(manifest))):
        (draft / name).write_bytes(data)
        sync(draft / name)
    sync(draft)
    target = draft.with_name(draft.stem.removeprefix(DRAFT))
    replaced = draft.with_name(f"{REPLACED}{target.name}")
    if target.exists():  # damaged, or written after the last step of an epoch, before its end
        os.replace(target, replaced)
    try:
        os.replace(draft, target)
    except OSError:
        put_back(draft.parent)
        raise
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(directory: Path, keep: int, name: str, known: Collection[str]) -> None:
    """Removes all checkpoints of this job but the newest ones up to one that was just written."""
    # Those of later steps are damaged, or the job would have gone on from them.
    found = checkpoints_in(directory)
    first = found.index(directory / name)
    for path in (*found[:first], *found[first + keep :]):
        if path.name in known:
            shutil.rmtree(path.replace(path.with_name(f"{_REMOVED}{path.name}")))


def damages(folder: Path, is_mine: Callable[[int], bool] = lambda number: True) -> Iterator[str]:
    """What is wrong with a checkpoint, naming each file; nothing if it is what was written."""
    try:
        files = read_manifest(folder).files
    except FormatError:  # another version wrote it: it need not be damaged
        raise
    except FileError as error:
        yield str(error)
        return
    for file in (file for number, file in enumerate(files) if is_mine(number)):
        path = folder / file.name
        try:
            size = path.stat().st_size
            if size != file.size:
                yield f"'{path}' has {size} bytes, {file.size} were written"
            elif sha256_of(path) != file.sha256:
                yield f"'{path}' has other contents than were written (its checksum differs)"
        except OSError as error:
            yield f"'{path}' cannot be read: {error.strerror or error}"


MANIFEST = "manifest.json"
# Its checksum, as `sha256sum --check` reads it.
CHECKSUM = "manifest.json.sha256"
FORMAT = 2


class SavedFile(msgspec.Struct, frozen=True):
    """A file of tensors, as one rank has written it."""

    name: str  # its name in the folder of the checkpoint
    size: int  # its bytes
    sha256: str  # its checksum
    rank: int  # the rank that has written it
    stages: tuple[int, ...]  # the stages of that rank


class SavedTensor(msgspec.Struct, frozen=True):
    """A variable, or what else is kept as a tensor."""

    label: str  # what people call it: the path of a weight, the name of a slot
    dtype: str  # name of its dtype
    shape: tuple[int, ...]  # its shape
    file: int  # number of the file that has it


class DataPosition(msgspec.Struct, frozen=True):
    """How far the data have been read."""

    kind: str  # `"arrays"`, `"PyDataset"`, `"tf.data"` or what else was read
    passes: int  # how often reading them has begun
    batches: int  # how many batches of the last pass have been trained
    epochs: int  # how many times the data set was called at an epoch's end
    in_pass: bool  # whether the next batch is one of that pass
    random: Any = None  # what a `PyDataset` draws its order from


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself."""

    format: int  # number of this format
    step: int  # steps trained since the first epoch
    epoch: int  # epochs that have ended
    epoch_step: int  # steps trained of the next one
    initial_epoch: int  # the first epoch of the `fit`
    learning_rate: float | None  # the one in force; `None` without
    position: DataPosition  # how far the data have been read
    # All tensors, by key: `model/3` is the fourth variable of the model
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]  # where they are
    facts: dict[str, Any]  # what must be the same to go on: see `facts_of`
    history: dict[str, list[Any]]  # logs of each epoch that has ended
    logs: dict[str, Any]  # logs of the last step, or of the epoch that it has ended
    callbacks: dict[str, Any]  # what callbacks remember, by class and number within the class
    plan: Any  # the plan in force, as JSON
    config: Any  # the configuration of the model, as JSON; `None` where it has none
    optimizer: Any  # the optimizer's, likewise
    compiled: Any  # what the model was compiled with, likewise
    versions: dict[str, str]  # of the packages in use
    written: str  # when, in ISO 8601

    def encode(self) -> bytes:
        """The manifest as JSON, in which losses may be NaN."""
        return json.dumps(msgspec.to_builtins(self), indent=1).encode()

    def where(self) -> str:
        """Epoch and step, for messages."""
        inside = f", step {self.epoch_step} of the next" if self.epoch_step else ""
        return f"{self.epoch} epoch{'' if self.epoch == 1 else 's'}{inside}"


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        text, checksum = path.read_bytes(), (folder / CHECKSUM).read_bytes()
        if checksum != checksum_of(text):
            raise ValueError("it has other contents than were written (its checksum differs)")
        number = (found := json.loads(text)).get("format")
        if number == FORMAT:
            return msgspec.convert(found, Manifest)
    except (OSError, ValueError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise FileError(f"'{path}' is damaged: {error}") from error
    raise FormatError(
        f"'{path}' has format {number}, this version reads {FORMAT}: use the version of "
        "tarantella_pp that has written it, or end that run with it."
    )


def checksum_of(manifest: bytes) -> bytes:
    """What stands in the file beside a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


# Tensors are in the format of safetensors, written and read one at a time:
#
#     8 bytes    length of the header
#     header     JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}
#     tensors    one behind the other, little-endian, in C order
#
# Shapes are known before values are, so the header comes first and no file is ever in memory.
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
