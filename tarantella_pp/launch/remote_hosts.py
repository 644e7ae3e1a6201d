"""Other hosts, before a job starts on them: each is asked for its name."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil

from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch.hosts import HostRanks

CONNECT_SECONDS = 10
LIMIT_SECONDS = 60.0
"""How long a host may take to answer."""


def check(hosts: Sequence[HostRanks], shell: Sequence[str]) -> None:
    """Makes sure that hosts can be reached, and are different ones.

    Args:
        hosts: The hosts.
        shell: The command that reaches one, such as `ssh`. None are asked without it.

    Raises:
        LaunchError: A host cannot be reached.
        ConfigurationError: Two names are those of one host.
    """
    own = _own_addresses()
    remote = [host.name for host in hosts if not is_here(host.name, own)]
    local = [host.name for host in hosts if host.name not in remote]
    names = {host: socket.gethostname() for host in local}
    names |= _names(remote, shell) if shell else {}
    for one, name in names.items():
        for other in names:
            if one != other and names[other] == name:
                raise ConfigurationError(
                    "Give each host one line, with its number of ranks behind it, and a name of "
                    f"its own. Received: --hostfile with {one} and {other}, which both say that "
                    f"their name is {name}"
                )


def is_here(host: str, own: set[str] | None = None) -> bool:
    """Whether a name or an address is that of this host.

    Args:
        host: The name.
        own: The addresses of this host, if they are known already.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # that of ssh's own configuration, perhaps
        return False
    return any(str(entry[4][0]) in (_own_addresses() if own is None else own) for entry in found)


def _own_addresses() -> set[str]:
    """Returns the addresses of this host."""
    links = psutil.net_if_addrs().values()
    return {address.address.partition("%")[0] for link in links for address in link}


def _names(hosts: Sequence[str], shell: Sequence[str]) -> dict[str, str]:
    """Returns what hosts call themselves, all asked at the same time."""
    options = [f"-oConnectTimeout={CONNECT_SECONDS}"] if shell[0].endswith("ssh") else []
    asked: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            command = [*shell, *options, host, "hostname"]
            asked[host] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        deadline = time.monotonic() + LIMIT_SECONDS
        return {host: _answer(host, shell, ask, deadline) for host, ask in asked.items()}
    except OSError as error:
        raise LaunchError(
            f"Cannot start `{shlex.join(shell)}`, which reaches other hosts: {error}. "
            "Install it, or name another one with --remote-shell."
        ) from error
    finally:
        for ask in asked.values():
            with contextlib.suppress(OSError):
                ask.kill()
            ask.communicate()


def _answer(host: str, shell: Sequence[str], ask: subprocess.Popen[str], deadline: float) -> str:
    """Returns the name that a host has answered with."""
    try:
        out, said = ask.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _refuse(host, shell, f"no answer within {LIMIT_SECONDS:g} s")
    lines = out.split()
    if ask.returncode != 0 or not lines:
        _refuse(host, shell, " ".join(said.split()) or f"exit code {ask.returncode}")
    return lines[-1]


def _refuse(host: str, shell: Sequence[str], why: str) -> NoReturn:
    raise LaunchError(
        f"Host {host} of --hostfile cannot be reached: {why}. `{shlex.join([*shell, host])}` must "
        "work without a password; another command than that is given with --remote-shell."
    )
