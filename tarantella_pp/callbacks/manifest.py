"""What a checkpoint says of itself: the state of training, its files, and what it was made of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.errors import FileError, FormatError

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
    facts: dict[str, Any]  # what must be the same to go on: see `run_facts`
    history: dict[str, list[Any]]  # logs of each epoch that has ended
    logs: dict[str, Any]  # logs of the last step
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
    except OSError as error:
        raise FileError(f"'{path}' is damaged: {error}") from error
    if checksum != checksum_of(text):
        raise FileError(f"'{path}' has other contents than were written (its checksum differs)")
    found = json.loads(text)
    if found.get("format") != FORMAT:
        raise FormatError(
            f"'{path}' has format {found.get('format')}, this version reads {FORMAT}: use the "
            "version of tarantella_pp that has written it, or end that run with it."
        )
    return msgspec.convert(found, Manifest)


def checksum_of(manifest: bytes) -> bytes:
    """What stands in the file beside a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()
