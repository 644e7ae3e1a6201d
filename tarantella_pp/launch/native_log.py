"""Standard error of a job on its way to the user: records of ranks are taken out, and noise.

Noise is what TensorFlow's native code says before training, and what MPICH says of a Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
from collections.abc import Callable

RECORD = b"\x1e\x1e"
"""What a record begins with: ASCII's separator of records, twice."""
_STANDARD_ERROR = 2
_LABEL = rb"(?:\[[^\]\n]*\](?:<stderr>:)? ?|\d+: )?"
"""The rank, where the MPI launcher writes it there."""
_RECORD = _LABEL + rb"\x1e(?:\x1e(?P<record>[^\n]*)\n?|\Z)"
_OF_MPICH = rb"\[mpiexec@[^\]\n]*\] (?:Sending Ctrl-C to|Press Ctrl-C again to)[^\n\x1e]*\n?"
_OF_TENSORFLOW = (
    _LABEL + rb"(?:I\d{4} \d\d:\d\d:[\d.]+ |WARNING: All log messages before absl::"
    rb"|W\d{4} .* util\.cc:\d+\] Not handling type )[^\n\x1e]*\n?"
)
"""Lines of the level INFO, which no variable turns off while TensorFlow is imported, what stands
above them, and a warning for each float64 operation that oneDNN has no faster one for. They may
begin within a line: all ranks share one pipe, and a progress bar of another rank ends no line."""


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
