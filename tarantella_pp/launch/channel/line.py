"""One end of a connection that carries messages: a line of JSON each."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any

from tarantella_pp.errors import ConfigurationError

HEARTBEAT_VARIABLE = "TNT_HEARTBEAT"
HEARTBEAT_SECONDS = 60.0
"""How long a host may be silent."""
_PROBES = 6
"""Heartbeats in that time."""
_SHORTEST_SECONDS = 1
"""Between two of them."""
_TCP_INFO = struct.Struct("=52x2I")
"""Milliseconds since data, and since an answer to own data: the place in Linux' `tcp_info`."""
MOST_BYTES = 16 << 20
"""Of one message."""

Message = dict[str, Any]


class Line:
    """Sends and receives messages, and never waits unless it is told to.

    A message that is not an object, or is longer than any of ours, ends the connection.

    Attributes:
        ended: Why nothing comes any more, or None: the empty string after the other end has closed.
        timed_out: Whether that is because the other host was silent for too long.
    """

    def __init__(self, sock: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.ended: str | None = None
        self.timed_out = False
        self._socket = sock
        self._socket.setblocking(False)
        self._kept: list[Message] = []
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Returns the descriptor, for `select`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something has still to be sent."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Queues a message, and sends as much as can be sent at once."""
        if self.ended is None:
            self._outgoing += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Sends what is queued, waiting so long at most."""
        deadline = time.monotonic() + seconds
        while self._outgoing and self.ended is None:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [self], [], left)[1]:
                    return
            except OSError as error:
                self._end(error)

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """Returns the messages that have come, waiting so long at most for the first."""
        found, self._kept = self._kept, []
        deadline = time.monotonic() + seconds
        while self.ended is None:
            try:
                piece = self._socket.recv(1 << 16)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if found or left <= 0 or not select.select([self], [], [], left)[0]:
                    break
                continue
            except OSError as error:
                self._end(error)
                break
            if not piece:
                self.ended = ""
                break
            found += self._cut(piece)
        return found

    def receive_one(self, seconds: float) -> Message | None:
        """Returns the next message; those behind it come with the next call."""
        found = self.receive(seconds)
        self._kept = found[1:]
        return found[0] if found else None

    def end_if_silent(self, seconds: float) -> None:
        """Ends the connection if nothing was heard of the other host for so long; 0 is never.

        So does the system (`keep_alive`), but it counts anew from each message that is sent.
        """
        if self.ended is not None or seconds <= 0 or sys.platform != "linux":
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        longest = max(seconds, 2 * _SHORTEST_SECONDS)
        if min(_TCP_INFO.unpack(info)) > 1000 * longest:
            self._end(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def close(self) -> None:
        """Closes this end."""
        if self.ended is None:
            self.ended = ""
        with contextlib.suppress(OSError):
            self._socket.close()

    def leave(self, seconds: float) -> None:
        """Closes this end once the other one has got all, as it says by closing.

        What has come and was not read would otherwise destroy what is still on its way.
        """
        self.flush(seconds)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while self.ended is None and (left := deadline - time.monotonic()) > 0:
            self.receive(left)
        self.close()

    def _cut(self, piece: bytes) -> list[Message]:
        """Adds a piece; returns the messages that are complete."""
        self._incoming += piece
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        found = []
        try:
            if max(map(len, [*lines, rest])) > self.most_bytes:
                raise ValueError("a message that is too long")
            for text in lines:
                message = json.loads(text)
                if not isinstance(message, dict):
                    raise ValueError(f"no message: {message!r}"[:100])
                found.append(message)
        except (ValueError, RecursionError) as error:
            self.ended = f"received {error}"
        return found

    def _end(self, error: OSError) -> None:
        self.timed_out = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        self.ended = error.strerror or str(error)


def heartbeat_seconds() -> float:
    """Returns how long a host may be silent before it counts as dead; 0 for ever."""
    text = os.environ.get(HEARTBEAT_VARIABLE) or str(HEARTBEAT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigurationError(
            f"{HEARTBEAT_VARIABLE} is a number of seconds, 0 for ever. Received: {text!r}"
        )
    return seconds


def keep_alive(sock: socket.socket, seconds: float) -> None:
    """Has the system send heartbeats, whatever this process does, and end a silent connection.

    The kernel of the other host answers, so a process that computes, is stopped or has no time is
    alive; a host that has lost its power or its link is not. An outage that is shorter is survived.
    """
    if seconds <= 0:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    between = max(_SHORTEST_SECONDS, round(seconds / _PROBES))
    wanted = {
        "TCP_KEEPIDLE": between,
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": max(1000, round(1000 * seconds)),
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
