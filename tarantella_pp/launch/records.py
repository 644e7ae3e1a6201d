"""What becomes of each rank, in records that the launcher reads off the job's standard error.

Every MPI brings what ranks write there to the launcher, from all hosts::

    rank, its keeper  --standard error, through MPI-->  launcher, which takes records out

Such a line has a tag, and what has changed in the record. None is longer than a pipe takes at once,
so that none is cut by what others write: a traceback goes ahead of its record, in pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tarantella_pp.launch.processes import describe_exit

# What a record begins with: ASCII's separator of records, twice.
RECORD = b"\x1e\x1e"
_STANDARD_ERROR = 2
# The rank, where the MPI launcher writes it there.
_LABEL = rb"(?:\[[^\]\n]*\](?:<stderr>:)? ?|\d+: )?"
_RECORD = _LABEL + rb"\x1e(?:\x1e+(?P<record>[^\n]*)\n?|\Z)"
# Lines of the level INFO, which no variable turns off while TensorFlow is imported, what stands
# above them, a warning for each float64 operation that oneDNN has no faster one for, and an error
# where there is no driver of a GPU. They begin a line, or follow a progress bar of another rank,
# which ends none: all share one pipe. What begins like one and goes on later is held back, too.
_OF_TENSORFLOW = (
    rb"(?:(?m:^)|(?P<bar>\r[^\r\n\x1e]*?))" + _LABEL + rb"(?:"
    rb"I\d{4} \d\d:\d\d:[\d.]+ +(?:\d+ \S+\.cc:\d+\] |[^\n\x1e\]]{0,200}\Z)"
    rb"|WARNING: All log messages before absl::|W\d{4} .* util\.cc:\d+\] Not handling type "
    rb"|E\d{4} [^\n\x1e]* failed call to cuInit: [^\n\x1e]*\(303\))[^\n\x1e]*\n?"
)


class JobStderr:
    """A pipe to standard error, for a process to be given, without records and noise."""

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
        pieces = iter(lambda: os.read(self._source, 1 << 16), b"")
        for text in without_records(pieces, self._on_record, quiet=self._quiet):
            with contextlib.suppress(OSError):  # nobody reads any more: ranks must not be held up
                write_all(_STANDARD_ERROR, text)
        os.close(self._source)


def without_records(
    pieces: Iterable[bytes], on_record: Callable[[bytes], object], *, quiet: bool = True
) -> Iterator[bytes]:
    """Yields text without records and noise, as it comes."""
    taken_out = re.compile(b"|".join([_RECORD, *([_OF_TENSORFLOW] if quiet else [])]))

    def take(found: re.Match[bytes]) -> bytes:
        if not found[0].endswith(b"\n"):
            return found[0]  # is kept until its end is there
        if found["record"] is not None:
            on_record(found["record"])
        return found.groupdict().get("bar") or b""

    held = b""
    for piece in pieces:
        text = taken_out.sub(take, held + piece)
        begun = taken_out.search(text)
        text, held = (text[: begun.start()], text[begun.start() :]) if begun else (text, b"")
        if text:
            yield text
    if held:
        yield held


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

# Set where a job that fails is started again: the number of ranks that it had at first.
RESTARTS_VARIABLE = "TNT_RESTARTS"

STARTED = "started"
# Its script has ended, its process has not: MPI waits for the others there.
RETURNED = "returned"
FINISHED = "finished"
FAILED = "failed"
ENDED = (RETURNED, FINISHED, FAILED)

# Of one text in a line: JSON may write twelve bytes for each, and a pipe takes 4096 at once.
_MOST_CHARACTERS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The state of one rank, as far as it is known."""

    rank: int
    state: str = STARTED
    host: str = ""
    cause: str = ""
    details: str = ""  # its traceback
    exit_code: int = 0
    unexplained: bool = False  # whether MPI may have ended it, for another one
    stopped: bool = False  # whether a signal asked it to end
    order: int = 0  # of its last state among all ranks' states
    step: int | None = None  # how far `fit` has come
    is_final: bool = False  # whether it would fail the same way if it was started again


def write(file: int, rank: int, **fields: Any) -> None:
    """Writes what has changed in the record of a rank, for the launcher to read."""
    text = fields.pop("details", "")
    starts = range(0, len(text), _MOST_CHARACTERS)
    lines = [{"rank": rank, "piece": text[i : i + _MOST_CHARACTERS]} for i in starts]
    if "cause" in fields:
        fields["cause"] = fields["cause"][:_MOST_CHARACTERS]
    for line in [*lines, {"rank": rank, **fields}]:
        write_all(file, RECORD + json.dumps(line).encode() + b"\n")


class Records(dict[int, Record]):
    """What each rank has said, in the order in which it came: clocks of hosts differ."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self._pieces: dict[int, list[str]] = {}  # of texts whose records have not come yet
        self._count = 0
        self.last = time.monotonic()  # when a record came

    def take(self, line: bytes) -> None:
        """Takes a line that `write` has written; one that was garbled on its way is left out."""
        try:
            fields = json.loads(line)
            rank = int(fields.pop("rank"))
            known = self.get(rank, Record(rank))
            if "piece" in fields:
                self._pieces.setdefault(rank, []).append(fields.pop("piece"))
            elif pieces := self._pieces.pop(rank, []):
                fields["details"] = known.details + "".join(pieces)
            if "status" in fields:
                fields = _of_exit(known, fields["status"])
            if "state" in fields:
                fields["order"] = self._count = self._count + 1
            self[rank] = dataclasses.replace(known, **fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.last = time.monotonic()

    def all_in(self, *states: str) -> bool:
        """Whether every rank is in one of `states`."""
        return sum(record.state in states for record in self.values()) >= self.num_ranks

    def missing(self) -> list[int]:
        """Returns the ranks that have not been heard of."""
        return [rank for rank in range(self.num_ranks) if rank not in self]

    def first_failure(self) -> Record | None:
        """Returns the record of the rank that failed first, which MPI has not ended for another."""
        failed = [record for record in self.values() if record.state == FAILED]
        return min(failed, key=lambda record: (record.unexplained, record.order), default=None)


def _of_exit(known: Record, status: int) -> dict[str, Any]:
    """What the exit of a rank's process, in `subprocess`'s return code, changes in its record."""
    if known.state == FAILED:
        return {}
    if known.state == RETURNED and status == 0:
        return {"state": FINISHED}
    cause = describe_exit(status) if status < 0 else f"its process {describe_exit(status)}"
    return {
        "state": FAILED,
        "cause": cause if status else f"{cause} before its script did (os._exit?)",
        "exit_code": 128 - status if status < 0 else status or 1,
        # So it may have been MPI that ended it, since another rank has failed.
        "unexplained": status > 0 or status == -signal.SIGTERM,
    }


def headline(rank: int, size: int, host: str, cause: str) -> str:
    """Returns the line that names the rank that failed first, and why."""
    return f"tarantella: rank {rank} of {size} on host {host} failed first: {cause}"


def number_from(pointer: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns a number that MPI's launcher gave this process, in the variable named by another."""
    value = environ.get(environ.get(pointer, ""), "")
    return int(value) if value.isdigit() else None
