"""Which checkpoint all ranks go on from: the newest that is whole, seen by every rank alike."""

from __future__ import annotations

import logging
from pathlib import Path

from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files.checkpoint_folder import checkpoints_in
from tarantella_pp.files.manifest import MANIFEST, Manifest, read_manifest
from tarantella_pp.files.tensor_file import sha256_of
from tarantella_pp.files.verification import damage
from tarantella_pp.runtime.comm.communicator import Communicator

logger = logging.getLogger(__name__)


def newest_whole(ranks: Communicator, directory: Path) -> tuple[Path, Manifest, list[str]] | None:
    """Finds the newest checkpoint with right checksums; collective, each rank reads some files."""
    names = _seen_by_all(ranks, directory)
    damaged: list[str] = []
    for name in names:
        mine = damage(directory / name, lambda number: number % ranks.size == ranks.rank)
        problem = next(filter(None, ranks.allgather_json(mine)), "")
        if not problem:
            return directory / name, read_manifest(directory / name), damaged
        damaged.append(name)
        if ranks.rank == ranks.size - 1:
            logger.warning("checkpoint '%s' is damaged: %s", directory / name, problem)
    if damaged:
        raise FileError(
            f"All checkpoints in '{directory}' are damaged: {', '.join(damaged)}. "
            "`tarantella checkpoint verify` names what is damaged in each. Remove them to begin "
            "anew."
        )
    return None


def _seen_by_all(ranks: Communicator, directory: Path) -> list[str]:
    """The names of the checkpoints, the newest first, if all ranks see the same."""
    mine = [path.name for path in checkpoints_in(directory)]
    names: list[str] = ranks.broadcast_json(mine)
    prints = [_fingerprint(directory / name / MANIFEST) for name in names]
    seen_by = ranks.allgather_json([bool(mine), prints])
    odd = [
        rank
        for rank, (has_any, seen) in enumerate(seen_by)
        if seen != seen_by[0][1] or (has_any and not names)
    ]
    if odd:
        raise ConfigurationError(
            f"All ranks must see the same checkpoints in '{directory}'. Received: "
            f"{names or 'none'} on rank 0, others on ranks {odd}. Use a directory on a disk that "
            "all hosts share."
        )
    return names


def _fingerprint(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return "none"
