"""What one rank does alone, or each by itself, and what becomes of a failure: all learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tarantella_pp.errors import CommunicationError, ConfigurationError
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
    answer: list[Any] = [None, None]
    if communicator.rank == rank:
        try:
            answer = [None, work()]
        except Exception as caught:
            failure, answer = caught, [f"{type(caught).__name__}: {caught}", None]
    reason, result = communicator.broadcast_json(answer, rank)
    if failure is not None:
        raise failure
    if reason is not None:
        raise error(f"Rank {rank} could not {what}: {reason}")
    return result


def on_all_ranks(communicator: Communicator, what: str, work: Callable[[], Any]) -> None:
    """Lets each rank do its part, without messages to others; where one fails, all fail."""
    failure: Exception | None = None
    try:
        work()
    except CommunicationError:  # others cannot hear of it
        raise
    except Exception as caught:
        failure = caught
    answer = None if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = communicator.allgather_json(answer)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise ConfigurationError(f"Rank {rank} could not {what}: {reason}")
