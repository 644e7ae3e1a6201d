"""The last events between this rank and the others, for the report of a wait that never ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

_KEPT = 256

Event = tuple[float, str, str, int, int, int]


class FlightRecorder:
    """Ring buffer of the last communication events of one rank.

    The idea is that of the flight recorder of PyTorch's NCCL process group.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def add(self, state: str, label: str, peer: int = -1, tag: int = -1, nbytes: int = 0) -> None:
        """Notes an event."""
        self._events.append((time.monotonic(), state, label, peer, tag, nbytes))

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def lines(self, last: int = _KEPT) -> list[str]:
        """Returns the last events as text, oldest first, with their age in seconds."""
        now = time.monotonic()
        lines = []
        for moment, state, label, peer, tag, nbytes in tuple(self._events)[-last:]:
            where = "" if peer < 0 else f" rank {peer}"
            about = "" if tag < 0 else f" (tag {tag}, {nbytes} bytes)"
            lines.append(f"{moment - now:9.3f} s  {state:9s}{where} {label}{about}")
        return lines
