"""Files that are never half-written: each is written beside the old one, then put in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tarantella_pp.errors import FileError


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Writes a file that replaces an older one, of the same mode, when it is on the disk."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            write(target)  # a pipe or a device is written to, not replaced; a folder is an error
            return
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as folder:
            draft = Path(folder) / target.name
            write(draft)
            if target.exists():
                shutil.copymode(target, draft)
            sync(draft)
            os.replace(draft, target)
        sync(target.parent)
    except OSError as error:
        raise FileError(
            f"Cannot write '{path}': {error.strerror or error}. What was there before is unchanged."
        ) from error


def sync(path: Path) -> None:
    """Waits until a file, or the names of the files in a folder, would outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems do not sync folders; a file that cannot be synced is an error.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
