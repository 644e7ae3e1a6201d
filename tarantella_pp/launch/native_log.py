"""What TensorFlow's native code says before training: left out of what the ranks write."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable

_STANDARD_ERROR = 2
_NOISE = re.compile(
    rb"(\[[^\]\n]*\](<stderr>:)? ?|\d+: )?"  # the rank, where the MPI launcher writes it there
    rb"(I\d{4} \d\d:\d\d:[\d.]+ |WARNING: All log messages before absl::"
    rb"|W\d{4} .* util\.cc:\d+\] Not handling type )[^\n]*\n?"
)
"""Lines of the level INFO, which no variable turns off while TensorFlow is imported, what stands
above them, and a warning for each float64 operation that oneDNN has no faster one for. They may
begin within a line: all ranks share one pipe, and a progress bar of another rank ends no line."""


class QuietStderr:
    """A pipe to standard error that leaves out what is noise, and holds up nothing else.

    Give `descriptor` to a process as its standard error, then call `start`.
    """

    def __init__(self) -> None:
        self._source, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def start(self) -> None:
        """Begins to read, once the process has its own copy of the descriptor."""
        os.close(self.descriptor)
        self._thread.start()

    def finish(self, seconds: float = 1.0) -> None:
        """Waits until all that was written has been passed on, for a while."""
        self._thread.join(seconds)

    def _forward(self) -> None:
        pass_on(lambda: os.read(self._source, 1 << 16), _write)
        os.close(self._source)


def pass_on(read: Callable[[], bytes], write: Callable[[bytes], object]) -> None:
    """Passes text on without its noise, until there is no more."""
    held = b""
    while piece := read():
        text = _NOISE.sub(_unless_unfinished, held + piece)
        begun = _NOISE.search(text)
        text, held = (text[: begun.start()], text[begun.start() :]) if begun else (text, b"")
        if text:
            write(text)
    if held:
        write(held)


def _unless_unfinished(noise: re.Match[bytes]) -> bytes:
    """Nothing for a whole line; one that still lacks its end is kept until the end is there."""
    return b"" if noise[0].endswith(b"\n") else noise[0]


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, but the ranks must not be held up
        while text:
            text = text[os.write(_STANDARD_ERROR, text) :]
