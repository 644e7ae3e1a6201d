"""A rank joins its job's hub: both ends prove that they know the secret of the job.

::

    hub     {"nonce": N}
    rank    {"rank": 3, "nonce": M, "proof": HMAC(secret, "rank 3 N")}
    hub     {"proof": HMAC(secret, "hub M"), "records": [...], "stops": [...], "now": 81.5}
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from dataclasses import dataclass

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.channel.line import Line, heartbeat_seconds, keep_alive

HUB_VARIABLE = "TNT_LAUNCHER"
"""Addresses of the launcher, and its port: `10.0.0.1,fd00::1 40123`."""
SECRET_VARIABLE = "TNT_SECRET"  # noqa: S105 (a name)
CONNECT_SECONDS = 5.0
JOIN_SECONDS = 30.0
"""How long a rank tries to reach the launcher."""
GREETING_BYTES = 4096
"""The longest message before the other end has proved who it is."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """How to reach a hub."""

    addresses: tuple[str, ...]
    port: int
    secret: str

    @classmethod
    def parse(cls, text: str, secret: str) -> Whereabouts:
        """Reads what `str` writes."""
        addresses, _, port = text.partition(" ")
        return cls(tuple(addresses.split(",")), int(port), secret)

    def __str__(self) -> str:
        """Returns all but the secret."""
        return f"{','.join(self.addresses)} {self.port}"


def new_secret() -> str:
    """Returns a secret for a job."""
    return os.urandom(16).hex()


def proof(secret: str, text: str) -> str:
    """Returns what only those who know the secret can make of a text."""
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def is_proof(given: object, secret: str, text: str) -> bool:
    """Whether somebody else's proof is right."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(secret, text).encode()
    )


def join(hub: Whereabouts, rank: int) -> tuple[Line, dict[str, object]]:
    """Returns the line to the hub, and what it says first.

    With that is how far its monotonic clock is `"ahead"` of the one of this host.
    """
    start = time.monotonic()
    heartbeat = heartbeat_seconds()
    limit = min(JOIN_SECONDS, heartbeat or JOIN_SECONDS)
    while True:
        reasons = []
        for address in hub.addresses:
            try:
                return _joined(hub, address, rank, heartbeat)
            except (OSError, ValueError) as error:
                text = error.strerror if isinstance(error, OSError) else None
                reasons.append(f"{address} port {hub.port}: {text or error}")
        if time.monotonic() - start > limit:
            raise LaunchError(unreachable(socket.gethostname(), reasons))
        time.sleep(0.5)


def unreachable(host: str, reasons: list[str]) -> str:
    """Returns what to say when a host cannot reach the launcher."""
    return (
        f"host {host} cannot reach the launcher ({'; '.join(reasons)}). Ranks tell it over TCP how "
        "they are; let connections between the hosts of a job pass the firewall"
    )


def take_whereabouts() -> Whereabouts:
    """Takes those of the launcher out of the environment, so that no script inherits the secret."""
    secret = os.environ.pop(SECRET_VARIABLE)
    return Whereabouts.parse(os.environ.pop(HUB_VARIABLE), secret)


def _joined(
    hub: Whereabouts, address: str, rank: int, heartbeat: float
) -> tuple[Line, dict[str, object]]:
    """Joins at one address."""
    sock = socket.create_connection((address, hub.port), CONNECT_SECONDS)
    keep_alive(sock, heartbeat)
    line, nonce = Line(sock), os.urandom(16).hex()
    try:
        greeting = _next(line)
        text = f"rank {rank} {greeting.get('nonce')}"
        line.send({"rank": rank, "nonce": nonce, "proof": proof(hub.secret, text)})
        answer = _next(line)
        if not is_proof(answer.get("proof"), hub.secret, f"hub {nonce}"):
            raise ValueError("another service answers there")
        if isinstance(now := answer.get("now"), float):
            answer["ahead"] = now - time.monotonic()  # less than the way of a message too small
    except BaseException:
        line.close()
        raise
    return line, answer


def _next(line: Line) -> dict[str, object]:
    """Returns the next message."""
    message = line.receive_one(JOIN_SECONDS)
    if message is None:
        raise ValueError(line.ended or "the launcher does not answer")
    return message
