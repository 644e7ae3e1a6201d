"""Data that goes to JSON and back: checked on the way in, whole or absent on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from tarantella_pp.errors import ConfigurationError, FileError, PlanError
from tarantella_pp.files import replace_file

#: Files larger than this are refused before they are parsed.
MAX_FILE_BYTES = 256 * 2**20


class JsonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that is kept as JSON; one that cannot be right raises `PlanError` when made."""

    noun: ClassVar[str]  # what messages call it

    def to_json(self) -> str:
        """Returns the JSON text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads JSON text; every field is checked and unknown ones are refused."""
        if len(text) > MAX_FILE_BYTES:
            raise PlanError(
                f"A {cls.noun} has at most {MAX_FILE_BYTES} bytes. Received: {len(text)} bytes"
            )
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            reason = str(error)
            if isinstance(error, msgspec.ValidationError) and "version" in cls.__struct_fields__:
                reason += ". Another version of tarantella_pp may have written it: use that one, "
                reason += f"or make the {cls.noun} anew"
            raise PlanError(f"This is no valid {cls.noun}: {reason}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file; one that is there is replaced in one step."""
        data = f"{self.to_json()}\n".encode()
        try:
            replace_file(path, lambda draft: draft.write_bytes(data))
        except FileError as error:
            raise ConfigurationError(f"{error} Name a file that can be written.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a JSON file."""
        text = read(path, cls.noun)
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def read(path: str | os.PathLike[str], noun: str) -> bytes:
    """Reads a file, a byte more than is allowed at the most."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PlanError(f"Cannot read the {noun} '{path}': {error.strerror or error}") from error
