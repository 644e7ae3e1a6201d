"""A file that is never half-written: written beside the old one, then put in its place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tarantella_pp.callbacks.checkpoint_folder import sync
from tarantella_pp.errors import FileError


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file that replaces an older one when it is complete and on the disk."""
    path = Path(os.path.realpath(path))
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        draft = folder / path.name
        write(draft)
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    except OSError as error:
        raise FileError(
            f"Cannot write '{path}': {error}. What was there before is unchanged."
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
