"""The DIRECTORY of a command: that of a run's checkpoints, or one of them."""

from __future__ import annotations

from pathlib import Path

from tarantella_pp.errors import ConfigurationError

HELP = "the directory that a Checkpoint callback was given, or one checkpoint in it"


def found_in(directory: str) -> list[Path]:
    """The checkpoints that a DIRECTORY names, the newest first."""
    from tarantella_pp.checkpoints.checkpoint_folder import checkpoints_in
    from tarantella_pp.checkpoints.manifest import MANIFEST

    path = Path(directory)
    siblings = checkpoints_in(path.parent)
    if (path / MANIFEST).is_file() or path in siblings:
        return [path]
    found = checkpoints_in(path)
    if not found:
        what = "has no checkpoints" if path.is_dir() else "is no directory"
        raise ConfigurationError(f"{directory!r} {what}.")
    return found
