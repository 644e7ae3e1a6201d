"""The hosts of a job: read from a file in one format, and which ranks run on which of them."""

from __future__ import annotations

import pathlib
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.errors import ConfigurationError

_ANSWER_SECONDS = 15.0
# `host`, `host:4` or `host slots=4`. ssh takes no name that begins with a dash for an option.
_LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)(?:(?::|\s+slots\s*=\s*)(\d+))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of one host, which are neighbours."""

    name: str
    ranks: range

    def __str__(self) -> str:
        """Returns what a user reads of it."""
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {last}" if first == last else f"ranks {first} to {last}"
        return f"host {self.name}: {ranks}"


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Returns the hosts of a file."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read --hostfile {path}: {error}") from error
    texts = [(number, line.split("#")[0].strip()) for number, line in enumerate(lines, 1)]
    hosts = tuple(_host(path, number, text) for number, text in texts if text)
    if not hosts:
        raise ConfigurationError(f"--hostfile {path} names no host. Received: an empty file")
    names = Counter(host.name for host in hosts)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(
            f"--hostfile {path}: each host has one line, with its number of ranks behind it, as in "
            f"`{twice[0]}:2`. Received twice: {', '.join(twice)}"
        )
    return hosts


def with_room(
    hosts: Sequence[Host], num_ranks: int | None = None, per_node: int | None = None
) -> tuple[Host, ...]:
    """Returns the hosts with the number of ranks that each may have."""
    if per_node is not None:
        if wrong := [host for host in hosts if host.slots is not None and host.slots < per_node]:
            raise ConfigurationError(
                f"--n-per-node asks for more ranks than host {wrong[0].name} has slots, which are "
                f"{wrong[0].slots}. Received: --n-per-node={per_node}"
            )
        room = [per_node] * len(hosts)
    elif num_ranks is None or any(host.slots is not None for host in hosts):
        room = [1 if host.slots is None else host.slots for host in hosts]
    else:
        each, left = divmod(num_ranks, len(hosts))
        room = [max(1, each + (index < left)) for index in range(len(hosts))]
    if num_ranks is not None and num_ranks > sum(room):
        remedy = "--n-per-node" if per_node is not None else "slots"
        raise ConfigurationError(
            f"The hosts take {sum(room)} ranks; ask for fewer, or give them more {remedy}. "
            f"Received: -n {num_ranks}"
        )
    return tuple(Host(host.name, most) for host, most in zip(hosts, room, strict=True))


def place(hosts: Sequence[Host], num_ranks: int | None = None) -> tuple[HostRanks, ...]:
    """Fills one host after the other, so that few of a pipeline's links cross the network."""
    found, first = [], 0
    for host in hosts:
        left = (host.slots or 0) if num_ranks is None else num_ranks - first
        if count := min(host.slots or 0, left):
            found.append(HostRanks(host.name, range(first, first + count)))
            first += count
    return tuple(found)


def that_answer(hosts: Sequence[Host], shell: Sequence[str]) -> tuple[Host, ...]:
    """Returns the hosts that a remote shell reaches, and this one; asks all at once."""
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    asked = {
        host: subprocess.Popen([*shell, host.name, "true"], **silent)  # type: ignore[call-overload]
        for host in hosts
        if not _is_here(host.name)
    }
    until = time.monotonic() + _ANSWER_SECONDS
    for one in asked.values():
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    return tuple(host for host in hosts if host not in asked or asked[host].returncode == 0)


def _is_here(name: str) -> bool:
    """Whether a name is one of this host, which need not have a server for remote shells."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
            tried.bind((name, 0))
    except OSError:
        return False
    return True


def _host(path: str, number: int, text: str) -> Host:
    match = _LINE.fullmatch(text)
    if match is None or (match[2] and not int(match[2])):
        raise ConfigurationError(
            f"--hostfile {path}, line {number}: expected `host`, `host:4` or `host slots=4`, with "
            f"at least one slot. Received: {text!r}"
        )
    return Host(match[1], int(match[2]) if match[2] else None)
