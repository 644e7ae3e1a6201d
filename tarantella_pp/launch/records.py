"""What becomes of each rank, in records that the launcher reads off the job's standard error.

Every MPI brings what ranks write there to the launcher, from all hosts::

    rank  --pipe-->  its keeper  --standard error, through MPI-->  launcher, which takes it out

A record is a line with a tag. None is longer than a pipe takes at once, so that none is cut by what
others write: a traceback goes ahead of its record, in pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable

# What a record begins with: ASCII's separator of records, twice.
RECORD = b"\x1e\x1e"
_STANDARD_ERROR = 2
# The rank, where the MPI launcher writes it there.
_LABEL = rb"(?:\[[^\]\n]*\](?:<stderr>:)? ?|\d+: )?"
_RECORD = _LABEL + rb"\x1e(?:\x1e(?P<record>[^\n]*)\n?|\Z)"
_OF_MPICH = rb"\[mpiexec@[^\]\n]*\] (?:Sending Ctrl-C to|Press Ctrl-C again to)[^\n\x1e]*\n?"
# Lines of the level INFO, which no variable turns off while TensorFlow is imported, what stands
# above them, and a warning for each float64 operation that oneDNN has no faster one for. They may
# begin within a line: all ranks share one pipe, and a progress bar of another rank ends no line.
_OF_TENSORFLOW = (
    _LABEL + rb"(?:I\d{4} \d\d:\d\d:[\d.]+ |WARNING: All log messages before absl::"
    rb"|W\d{4} .* util\.cc:\d+\] Not handling type )[^\n\x1e]*\n?"
)


class JobStderr:
    """A pipe to standard error that takes records out and leaves out noise.

    Give `descriptor` to a process as its standard error, then call `start`.
    """

    def __init__(self, on_record: Callable[[bytes], object], *, quiet: bool) -> None:
        self._source, self.descriptor = os.pipe()
        self._on_record = on_record
        self._quiet = quiet
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def start(self) -> None:
        """Begins to read, once the process has its own copy of the descriptor."""
        os.close(self.descriptor)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Waits until all that was written has been passed on, for a while."""
        self._thread.join(seconds)

    def _forward(self) -> None:
        def read() -> bytes:
            return os.read(self._source, 1 << 16)

        def write(text: bytes) -> None:
            with contextlib.suppress(OSError):  # nobody reads any more: ranks must not be held up
                write_all(_STANDARD_ERROR, text)

        pass_on(read, write, self._on_record, quiet=self._quiet)
        os.close(self._source)


def pass_on(
    read: Callable[[], bytes],
    write: Callable[[bytes], object],
    on_record: Callable[[bytes], object],
    *,
    quiet: bool = True,
) -> None:
    """Passes text on without records and noise, until there is no more."""
    patterns = [_RECORD, _OF_MPICH, *([_OF_TENSORFLOW] if quiet else [])]
    taken_out = re.compile(b"|".join(patterns))

    def take(found: re.Match[bytes]) -> bytes:
        if not found[0].endswith(b"\n"):
            return found[0]  # is kept until its end is there
        if found["record"] is not None:
            on_record(found["record"])
        return b""

    held = b""
    while piece := read():
        text = taken_out.sub(take, held + piece)
        begun = taken_out.search(text)
        text, held = (text[: begun.start()], text[begun.start() :]) if begun else (text, b"")
        if text:
            write(text)
    if held:
        write(held)


def write_all(file: int, text: bytes) -> None:
    """Writes all of a text, also where another process has set the file not to block."""
    while text:
        try:
            text = text[os.write(file, text) :]
        except BlockingIOError:
            select.select([], [file], [])


SIZE_VARIABLE = "TNT_NUM_RANKS"
# Names the variable in which the MPI launcher in use tells a process its rank.
RANK_VARIABLE = "TNT_RANK_FROM"
# The same for its number among the ranks of its host.
LOCAL_RANK_VARIABLE = "TNT_LOCAL_RANK_FROM"

STARTED = "started"
# Its script has ended, its process has not: MPI waits for the others there.
RETURNED = "returned"
FINISHED = "finished"
FAILED = "failed"
ENDED = (RETURNED, FINISHED, FAILED)

# Of one text in a line: JSON may write six bytes for each, and a pipe takes 4096 at once.
_MOST_CHARACTERS = 600


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

    The launcher in use counts: a shell may have variables of other jobs' launchers.
    """
    value = os.environ.get(os.environ[pointer], "")
    return int(value) if value.isdigit() else None
