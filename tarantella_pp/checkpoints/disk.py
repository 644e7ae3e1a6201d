"""What is written is on the disk before anybody relies on it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or the names of the files in a folder, would outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems do not sync folders; a file that cannot be synced is an error.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
