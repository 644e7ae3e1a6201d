"""What one rank does alone, and all others wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator


def on_one_rank(
    communicator: Communicator,
    rank: int,
    what: str,
    work: Callable[[], Any],
    error: type[Exception] = ConfigurationError,
) -> Any:
    """Lets one rank do something alone; all ranks wait for it and learn of a failure."""
    failure: Exception | None = None
    told: list[Any] = [None, None]
    if communicator.rank == rank:
        try:
            told = [None, work()]
        except Exception as caught:
            failure, told = caught, [f"{type(caught).__name__}: {caught}", None]
    reason, result = communicator.broadcast_json(told, rank)
    if failure is not None:
        raise failure
    if reason is not None:
        raise error(f"Rank {rank} could not {what}: {reason}")
    return result
