"""What each rank last said of itself, and what follows from it for the job."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time

from tarantella_pp.launch.channel.line import Line

SIZE_VARIABLE = "TNT_NUM_RANKS"
RANK_VARIABLE = "TNT_RANK_FROM"
"""Names the variable in which the MPI launcher in use tells a process its rank."""
LOCAL_RANK_VARIABLE = "TNT_LOCAL_RANK_FROM"
"""The same for its number among the ranks of its host."""

_SEND_SECONDS = 5.0
"""How long a rank may wait for room to send a record."""

STARTED = "started"
RETURNED = "returned"
FINISHED = "finished"
FAILED = "failed"
ENDED = (RETURNED, FINISHED, FAILED)
GONE = (FINISHED, FAILED)
"""Of a rank in another state, whose script may have ended, something is yet to come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The state of one rank."""

    rank: int
    state: str
    pid: int
    host: str
    time: float
    cause: str = ""
    details: str = ""
    exit_code: int = 0
    waiting_at: str = ""
    culprit: int | None = None
    starts_mpi: bool = False
    met: bool = False
    hidden_lines: int = 0
    unexplained: bool = False
    order: int = 0
    ended_at: float = 0.0

    @classmethod
    def of_this_process(cls, rank: int, state: str) -> Record:
        """Returns the record of the calling process, in `state` from now on."""
        return cls(rank, state, os.getpid(), socket.gethostname(), time.monotonic())

    @classmethod
    def from_message(cls, fields: object) -> Record | None:
        """Returns a record that somebody has sent; None for what is none."""
        if not isinstance(fields, dict):
            return None
        try:
            record = cls(**fields)
        except TypeError:
            return None
        kinds = (record.rank, int), (record.state, str), (record.exit_code, int)
        return record if all(isinstance(value, kind) for value, kind in kinds) else None

    def becomes(self, state: str, **changes: object) -> Record:
        """Returns this record in another `state` from now on, with other fields changed."""
        return dataclasses.replace(self, state=state, time=time.monotonic(), **changes)  # type: ignore[arg-type]


class RankRecords:
    """The records of a job, as one of its ranks knows them.

    A rank knows of the others what the hub passes on: who has ended, how, and who waits. When the
    connection has broken, it keeps what it knows, and takes writes without complaint: records help
    to explain the end of a job, they must not be the reason for it.
    """

    def __init__(self, line: Line, known: object = ()) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._records: dict[int, Record] = {}
        self._take(known)

    def write(self, record: Record) -> None:
        """Replaces the record of this rank."""
        with self._lock:
            self._records[record.rank] = record
            self._line.send({"record": dataclasses.asdict(record)})
            self._line.flush(_SEND_SECONDS)

    def read(self) -> dict[int, Record]:
        """Returns the records of all ranks that are known of, by rank."""
        with self._lock:
            for message in self._line.receive():
                self._take(message.get("records"))
            return dict(self._records)

    def wait_for_order(self, rank: int, seconds: float) -> None:
        """Waits until the hub has told when it heard of a rank, for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            record = self.read().get(rank)
            if record is None or record.order:
                return
            time.sleep(0.01)

    def _take(self, told: object) -> None:
        for each in told if isinstance(told, list) else ():
            record = Record.from_message(each)
            if record is not None:
                self._records[record.rank] = dataclasses.replace(record, time=time.monotonic())


def first_failed(records: dict[int, Record]) -> Record | None:
    """Returns the record of the rank that failed first, likely consequences of others last."""
    failed = [record for record in records.values() if record.state == FAILED]
    return min(
        failed,
        key=lambda r: (
            r.culprit is not None,
            r.unexplained,
            r.ended_at,
            r.order or sys.maxsize,
        ),
        default=None,
    )


def first_failure(records: dict[int, Record]) -> Record | None:
    """Returns the failure that the job is to be ended with, or None.

    It is the first one. But when a rank failed because it waited for one that had ended, that one
    ended too early, and this is the failure.
    """
    first = first_failed(records)
    if first is None:
        return None
    culprit = records.get(first.rank if first.culprit is None else first.culprit, first)
    if culprit.state == FAILED:
        return culprit
    cause = f"{culprit.cause} while rank {first.rank} waits for it"
    return dataclasses.replace(
        culprit, state=FAILED, cause=cause, details=first.details, exit_code=1
    )


def find_deadlock(records: dict[int, Record], size: int, patience: float) -> Record | None:
    """Returns the failure of the rank that ended while all others wait for it, or None.

    A rank may well end long before the others: the one that saves the model works on. The job is
    stuck only when no rank works any more, that is when each of them has ended or sits in
    a blocking MPI call, or when one has ended without MPI that others start, which takes all. And
    this must have been so for `patience` seconds.
    """
    ended = [record for record in records.values() if record.state in ENDED]
    waiting = [record for record in records.values() if record.waiting_at]
    if any(record.starts_mpi for record in waiting) and not all(record.met for record in ended):
        ended = [record for record in ended if not record.met]
        waiting = [record for record in waiting if record.starts_mpi]
    elif not ended or not waiting or len(ended) + len(waiting) < size:
        return None
    if time.monotonic() - max(record.time for record in records.values()) < patience:
        return None
    first = min(ended, key=lambda record: record.order or sys.maxsize)
    places = "; ".join(f"rank {r.rank} at {r.waiting_at}" for r in waiting[:4])
    cause = f"{first.cause or 'its script ended'} while other ranks wait for it ({places})"
    return dataclasses.replace(first, state=FAILED, cause=cause, exit_code=1)


def headline(record: Record, size: int) -> str:
    """Returns the line that names the rank that failed first, and why."""
    return (
        f"tarantella: rank {record.rank} of {size} on host {record.host} failed first: "
        f"{record.cause}"
    )
