"""What each rank last said of itself: one small JSON file per rank in a directory of the job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import time

DIRECTORY_VARIABLE = "TNT_RUN_DIR"
SIZE_VARIABLE = "TNT_NUM_RANKS"
RANK_VARIABLE = "TNT_RANK_FROM"
"""Names the variable in which the MPI launcher in use tells a process its rank."""
LOCAL_RANK_VARIABLE = "TNT_LOCAL_RANK_FROM"
"""The same for its number among the ranks of its host."""

STARTED = "started"
RETURNED = "returned"
FINISHED = "finished"
FAILED = "failed"
ENDED = (RETURNED, FINISHED, FAILED)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The state of one rank.

    Args:
        rank: Number of the rank in the job.
        state: `"started"`; `"returned"` once its script has ended normally; `"finished"` once its
            process has, too; `"failed"` when either ended in any other way.
        pid: Process id of the rank on its host.
        host: Name of the host.
        time: Seconds since the epoch at which the rank came into this state.
        cause: One line that says how the rank failed, or by which call it ended.
        details: Traceback of a failure, or the empty string.
        exit_code: Exit code the rank ends with.
        waiting_at: Place of the blocking MPI call the rank has not come out of. Only looked at
            once another rank has ended.
        culprit: The rank whose end made this one fail, if this failure is only a consequence.
        starts_mpi: Whether it waits, at `waiting_at`, for all others to start MPI.
        met: Whether it has started MPI before it ended.
        hidden_lines: Lines that it printed and nobody saw.
    """

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

    @classmethod
    def of_this_process(cls, rank: int, state: str) -> Record:
        """Returns the record of the calling process, in `state` from now on."""
        return cls(rank, state, os.getpid(), socket.gethostname(), time.time())

    def becomes(self, state: str, **changes: object) -> Record:
        """Returns this record in another `state` from now on, with other fields changed."""
        return dataclasses.replace(self, state=state, time=time.time(), **changes)  # type: ignore[arg-type]


class RunDirectory:
    """The directory of one job, in which every rank keeps its record.

    Files are replaced in one step, so that a reader never sees half a record. A directory that
    has gone, or that this host does not see, reads as empty and takes writes without complaint:
    the records help to explain the end of a job, they must not be the reason for it.

    Args:
        path: The directory. It need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self._stamp = -1
        self._records: dict[int, Record] = {}

    def write(self, record: Record) -> None:
        """Replaces the record of one rank."""
        target = self.path / f"rank-{record.rank}.json"
        partial = target.with_suffix(f".{os.getpid()}.partial")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
            partial.replace(target)

    def read(self) -> dict[int, Record]:
        """Returns the records of all ranks that have one, by rank.

        The files are read only when the directory has changed since the last call.
        """
        try:
            stamp = self.path.stat().st_mtime_ns
        except OSError:
            return self._records
        # A change within one tick of the file system's clock leaves the stamp as it was, so a
        # directory that changed just now is read again.
        if stamp != self._stamp or time.time_ns() - stamp < 1_000_000_000:
            self._stamp = stamp
            self._records = {r.rank: r for r in map(_load, self.path.glob("rank-*.json")) if r}
        return self._records

    def request_stop(self, signal_number: int) -> None:
        """Asks the minders of all ranks to pass a signal on to their rank."""
        (self.path / f"stop-{signal_number}").touch()

    def stop_requests(self) -> set[int]:
        """Returns the signals that were asked for so far."""
        return {int(path.name[len("stop-") :]) for path in self.path.glob("stop-*")}


def first_failed(records: dict[int, Record]) -> Record | None:
    """Returns the record of the rank that failed first, those that name a culprit last."""
    failed = [record for record in records.values() if record.state == FAILED]
    return min(failed, key=lambda record: (record.culprit is not None, record.time), default=None)


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
    if time.time() - max(record.time for record in records.values()) < patience:
        return None
    first = min(ended, key=lambda record: record.time)
    places = "; ".join(f"rank {r.rank} at {r.waiting_at}" for r in waiting[:4])
    cause = f"{first.cause or 'its script ended'} while other ranks wait for it ({places})"
    return dataclasses.replace(first, state=FAILED, cause=cause, exit_code=1)


def headline(record: Record, size: int) -> str:
    """Returns the line that names the rank that failed first, and why."""
    return (
        f"tarantella: rank {record.rank} of {size} on host {record.host} failed first: "
        f"{record.cause}"
    )


def _load(path: pathlib.Path) -> Record | None:
    """Reads one record; a file that has just gone or is not one of ours counts as none."""
    # With json, for what a rank fails of may name a file whose name is no Unicode.
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
