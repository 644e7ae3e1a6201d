"""What becomes of each rank, in records that the launcher reads off the job's standard error.

Every MPI brings what ranks write there to the launcher, from all hosts::

    rank  --pipe-->  its keeper  --standard error, through MPI-->  launcher, which takes it out

A record is a line with a tag. None is longer than a pipe takes at once, so that none is cut by what
others write: a traceback goes ahead of its record, in pieces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time

from tarantella_pp.launch.native_log import RECORD, write_all

SIZE_VARIABLE = "TNT_NUM_RANKS"
RANK_VARIABLE = "TNT_RANK_FROM"
"""Names the variable in which the MPI launcher in use tells a process its rank."""
LOCAL_RANK_VARIABLE = "TNT_LOCAL_RANK_FROM"
"""The same for its number among the ranks of its host."""

STARTED = "started"
RETURNED = "returned"
"""Its script has ended, its process has not: MPI waits for the others there."""
FINISHED = "finished"
FAILED = "failed"
ENDED = (RETURNED, FINISHED, FAILED)

_MOST_CHARACTERS = 600
"""Of one text in a line: JSON may write six bytes for each, and a pipe takes 4096 at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The state of one rank."""

    rank: int
    state: str = STARTED
    host: str = dataclasses.field(default_factory=socket.gethostname)
    cause: str = ""
    details: str = ""
    exit_code: int = 0
    starts_mpi: str = ""
    met: bool = False
    hidden_lines: int = 0
    unexplained: bool = False
    stopped: bool = False
    order: int = 0
    time: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of this rank."""
        return self.state in (FINISHED, FAILED)

    def becomes(self, state: str, **changes: object) -> Record:
        """Returns this record in another `state`, with other fields changed."""
        return dataclasses.replace(self, state=state, **changes)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Returns all of it in one line."""
        return json.dumps(dataclasses.asdict(self))


def write(record: Record, file: int) -> None:
    """Writes a record for the launcher to read."""
    text = record.details
    starts = range(0, len(text), _MOST_CHARACTERS)
    lines = [{"rank": record.rank, "piece": text[i : i + _MOST_CHARACTERS]} for i in starts]
    short = dataclasses.replace(record, details="", cause=record.cause[:_MOST_CHARACTERS])
    for line in [*lines, dataclasses.asdict(short)]:
        write_all(file, RECORD + json.dumps(line).encode() + b"\n")


class Records(dict[int, Record]):
    """The last record of each rank that has one, numbered as they come.

    No clock of another host has to do with the order.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self._pieces: dict[int, str] = {}
        self._count = 0

    def take(self, line: bytes) -> None:
        """Takes a line that `write` has written; one that was garbled on its way is left out."""
        try:
            fields = json.loads(line)
            rank = int(fields["rank"])
            if "piece" in fields:
                self._pieces[rank] = self._pieces.get(rank, "") + fields["piece"]
                return
            record = Record(**fields)
        except (ValueError, TypeError, KeyError):
            return
        self._count += 1
        details = self._pieces.pop(rank, "") or (self[rank].details if rank in self else "")
        self[rank] = dataclasses.replace(
            record, details=details, order=self._count, time=time.monotonic()
        )

    def all_in(self, *states: str) -> bool:
        """Whether every rank is in one of `states`."""
        return sum(record.state in states for record in self.values()) >= self.num_ranks

    def missing(self) -> list[int]:
        """Returns the ranks that have not been heard of."""
        return [rank for rank in range(self.num_ranks) if rank not in self]

    def age(self) -> float:
        """Returns the seconds since the last record came."""
        return time.monotonic() - max(record.time for record in self.values())

    def first_failure(self) -> Record | None:
        """Returns the record of the rank that failed first.

        One that MPI may have ended, for another one, comes last.
        """
        failed = [record for record in self.values() if record.state == FAILED]
        return min(failed, key=lambda record: (record.unexplained, record.order), default=None)

    def left_before_mpi(self, patience: float) -> Record | None:
        """Returns the failure of a rank that has ended without MPI, which others start.

        That takes all ranks. A rank whose script has ended may come to MPI no more.
        """
        ended = [record for record in self.values() if record.state in ENDED and not record.met]
        waiting = [record for record in self.values() if record.starts_mpi]
        if not ended or not waiting or self.age() < patience:
            return None
        first = min(ended, key=lambda record: record.order)
        places = "; ".join(f"rank {r.rank} at {r.starts_mpi}" for r in waiting[:4])
        cause = f"{first.cause or 'its script ended'} while other ranks wait for it ({places})"
        return first.becomes(FAILED, cause=cause, exit_code=1)


def headline(record: Record, size: int) -> str:
    """Returns the line that names the rank that failed first, and why."""
    return (
        f"tarantella: rank {record.rank} of {size} on host {record.host} failed first: "
        f"{record.cause}"
    )


def number_from(pointer: str) -> int | None:
    """Returns a number that the MPI launcher gave this process, in the variable named by another.

    The launcher in use counts, for those of other jobs leave their variables to a shell.
    """
    value = os.environ.get(os.environ[pointer], "")
    return int(value) if value.isdigit() else None
