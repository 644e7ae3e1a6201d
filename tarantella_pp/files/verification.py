"""Whether a checkpoint is what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tarantella_pp.errors import FileError
from tarantella_pp.files.manifest import Manifest, SavedFile, read_manifest
from tarantella_pp.files.tensor_file import sha256_of


def damage(folder: Path, is_mine: Callable[[int], bool] = lambda number: True) -> str:
    """What is wrong with a checkpoint, naming the file; an empty text if nothing is."""
    try:
        manifest = read_manifest(folder)
    except FileError as error:
        return str(error)
    return next(_problems(folder, manifest, is_mine), "")


def all_damage(folder: Path) -> list[str]:
    """As `damage`, for every file of the checkpoint."""
    try:
        manifest = read_manifest(folder)
    except FileError as error:
        return [str(error)]
    return list(_problems(folder, manifest, lambda number: True))


def _problems(folder: Path, manifest: Manifest, is_mine: Callable[[int], bool]) -> Iterator[str]:
    for number, file in enumerate(manifest.files):
        problem = _problem(folder / file.name, file) if is_mine(number) else ""
        if problem:
            yield problem


def _problem(path: Path, file: SavedFile) -> str:
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"'{path}' has {size} bytes, {file.size} were written"
        if sha256_of(path) != file.sha256:
            return f"'{path}' has other contents than were written (its checksum differs)"
    except OSError as error:
        return f"'{path}' cannot be read: {error.strerror or error}"
    return ""
