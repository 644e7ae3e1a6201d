"""The folder of a run's checkpoints: how a new one comes there, and old ones go.

DIRECTORY/step-00000120/                 files of tensors, and the manifest, written last
DIRECTORY/.writing-step-00000130.5f1c/   one that is being written; a job that begins removes it
DIRECTORY/.replaced-step-00000120/       one that is being replaced; that job removes it, too

A directory belongs to one job at a time. No lock says so, for over a network a lock
can outlive its host. A job notices, before it writes, what it has neither found nor written.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tarantella_pp.callbacks.manifest import (
    CHECKSUM,
    MANIFEST,
    SavedFile,
    checksum_of,
    read_manifest,
)
from tarantella_pp.callbacks.tensor_file import sha256_of
from tarantella_pp.errors import ConfigurationError, FileError, FormatError
from tarantella_pp.files import sync

_NAME = re.compile(r"step-(\d{8,})")
# What the name of one begins with that is being written, and of one that is being replaced.
DRAFT = ".writing-"
_REPLACED = ".replaced-"


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
    for replaced in directory.glob(f"{_REPLACED}*"):
        target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not target.exists():
            os.replace(replaced, target)


def remove_leftovers(directory: Path) -> None:
    """Makes the directory, and removes what a kill has left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in (*directory.glob(f"{DRAFT}*"), *directory.glob(f"{_REPLACED}*")):
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
    replaced = draft.with_name(f"{_REPLACED}{target.name}")
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
            shutil.rmtree(path)


def damages(folder: Path, is_mine: Callable[[int], bool] = lambda number: True) -> Iterator[str]:
    """What is wrong with a checkpoint, naming each file; nothing if it is what was written."""
    try:
        files = read_manifest(folder).files
    except FormatError:  # another version wrote it: it need not be damaged
        raise
    except FileError as error:
        yield str(error)
        return
    for number, file in enumerate(files):
        if is_mine(number) and (problem := _problem(folder / file.name, file)):
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
