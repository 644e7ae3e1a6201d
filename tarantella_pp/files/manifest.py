"""What a checkpoint says of itself: the state of training, its files, and what it was made of."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.errors import FileError

MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.sha256"
"""Its checksum, as `sha256sum --check` reads it."""
FORMAT = 1


class SavedFile(msgspec.Struct, frozen=True):
    """A file of tensors, as one rank has written it.

    Attributes:
        name: Its name in the folder of the checkpoint.
        size: Its bytes.
        sha256: Its checksum.
        rank: The rank that has written it.
        stages: The stages of that rank.
    """

    name: str
    size: int
    sha256: str
    rank: int
    stages: tuple[int, ...]


class SavedTensor(msgspec.Struct, frozen=True):
    """A variable, or what else is kept as a tensor.

    Attributes:
        label: What people call it: the path of a weight, the name of a slot.
        dtype: Name of its dtype.
        shape: Its shape.
        file: Number of the file that has it.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    file: int

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


class DataPosition(msgspec.Struct, frozen=True):
    """How far the data have been read.

    Attributes:
        kind: `"arrays"`, `"PyDataset"`, `"tf.data"` or what else was read.
        passes: How often reading them has begun.
        batches: How many batches of the last pass have been trained.
        epochs: How many times the data set was called at an epoch's end.
        in_pass: Whether the next batch is one of that pass.
    """

    kind: str
    passes: int
    batches: int
    epochs: int
    in_pass: bool


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself.

    Attributes:
        format: Number of this format.
        step: Steps trained since the first epoch.
        epoch: Epochs that have ended.
        epoch_step: Steps trained of the next one.
        initial_epoch: That of the `fit`.
        learning_rate: The one in force; `None` without.
        position: How far the data have been read.
        tensors: All tensors, by key: `model/3` is the fourth variable of the model.
        files: Where they are.
        facts: What training was told, which must be the same to go on.
        history: Logs of each epoch that has ended.
        logs: Those of the last step.
        callbacks: What callbacks of Keras remember, by place and class.
        shapes: What the stages were compiled for first, by replica and stage.
        plan: The plan in force, as JSON.
        config: The configuration of the model, as JSON; `None` where it has none.
        optimizer: That of the optimizer.
        compiled: What the model was compiled with, likewise.
        versions: Of the packages in use.
        written: When, in ISO 8601.
        callback_states: What `state_dict` of callbacks returned, by class and number.
    """

    format: int
    step: int
    epoch: int
    epoch_step: int
    initial_epoch: int
    learning_rate: float | None
    position: DataPosition
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]
    facts: dict[str, Any]
    history: dict[str, list[Any]]
    logs: dict[str, Any]
    callbacks: list[tuple[str, dict[str, Any]]]
    shapes: dict[str, Any]
    plan: Any
    config: Any
    optimizer: Any
    compiled: Any
    versions: dict[str, str]
    written: str
    callback_states: dict[str, Any] = {}

    def encode(self) -> bytes:
        """The manifest as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def where(self) -> str:
        """Epoch and step, for messages."""
        inside = f", step {self.epoch_step} of the next" if self.epoch_step else ""
        return f"{self.epoch} epochs{inside}"


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        if (folder / CHECKSUM).read_bytes() != checksum_of(text):
            raise FileError(f"'{path}' has other contents than were written (its checksum differs)")
        number = msgspec.json.decode(text, type=dict[str, Any]).get("format")
        if number != FORMAT:
            raise FileError(
                f"'{path}' has format {number}, this version reads {FORMAT}: use the version of "
                "tarantella_pp that has written it."
            )
        return msgspec.json.decode(text, type=Manifest)
    except FileError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FileError(f"'{path}' is damaged: {error}") from error


def checksum_of(manifest: bytes) -> bytes:
    """What stands in the file beside a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def plain(value: Any) -> Any:
    """A value as JSON keeps it: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def from_plain(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    return value
