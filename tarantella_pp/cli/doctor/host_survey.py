"""What the hosts of a hostfile say of themselves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tarantella_pp.launch import host_answer, remote_hosts
from tarantella_pp.launch.channel import addresses
from tarantella_pp.launch.channel.hub import Hub
from tarantella_pp.launch.hosts import Host
from tarantella_pp.launch.remote_hosts import Answer

_VERSION = "import json, tarantella_pp as t; print(json.dumps({'version': t.__version__}))"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known of a host.

    Attributes:
        host: Its name in the hostfile.
        slots: The ranks it takes; None where its line does not say.
        silence: Why nothing is known; empty if it has answered.
        is_old: Whether its version of this package cannot say more than its name.
        name: What it says that its name is.
        versions: Of Python, this package, TensorFlow, Keras and the MPI library; None for one
            that it does not have.
        cores: Its cores.
        gpus: Its GPUs that ranks would see.
        has_folder: Whether it has the folder that ranks start in.
        ahead: Seconds that its clock is ahead of that of this host.
        obstacles: Why it cannot reach the launcher; empty if it can.
    """

    host: str
    slots: int | None = None
    silence: str = ""
    is_old: bool = False
    name: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    cores: int | None = None
    gpus: int | None = None
    has_folder: bool = True
    ahead: float | None = None
    obstacles: tuple[str, ...] = ()


class _Said(msgspec.Struct):
    """What `host_answer` prints; an older version prints a name and reasons only."""

    name: str = ""
    reasons: tuple[str, ...] = ()
    versions: dict[str, str | None] | None = None
    cores: int | None = None
    gpus: int | None = None
    has_folder: bool = True
    time: float | None = None


def this_host() -> HostFacts:
    """Returns what this Python says of its host."""
    said = msgspec.convert(host_answer.examined(os.getcwd()), _Said)
    return _facts(Host(socket.gethostname()), said, 0.0)


def survey(
    hosts: Sequence[Host], shell: Sequence[str], interpreter: Sequence[str]
) -> list[HostFacts]:
    """Asks hosts, all at once; one that does not answer is told by its silence."""
    own = addresses.own_addresses()
    here = {host.name for host in hosts if addresses.is_here(host.name, own)}
    hub, begin = Hub(1, [host.name for host in hosts if host.name not in here]), time.time()
    try:
        command = remote_hosts.question(interpreter, os.environ, hub.whereabouts, os.getcwd())
        answers = _ask([host.name for host in hosts], here, shell, command)
    finally:
        hub.close()
    found = [_heard(host, answers[host.name], begin, here, shell) for host in hosts]
    old = [facts.host for facts in found if facts.is_old]
    command = [*command[: command.index("-m")], "-c", _VERSION]
    versions = {name: said.found or {} for name, said in _ask(old, here, shell, command).items()}
    return [
        replace(facts, versions={"tarantella_pp": versions[facts.host].get("version")})
        if facts.is_old
        else facts
        for facts in found
    ]


def _ask(
    names: Sequence[str], here: set[str], shell: Sequence[str], command: Sequence[str]
) -> dict[str, Answer]:
    """Asks hosts; this one needs no shell."""
    commands = {
        name: command if name in here else remote_hosts.there(name, shell, command)
        for name in names
    }
    return {answer.host: answer for answer in remote_hosts.answers_of(commands)}


def _heard(
    host: Host, answer: Answer, begin: float, here: set[str], shell: Sequence[str]
) -> HostFacts:
    """Reads what came of asking a host."""
    why = answer.why
    if answer.found is not None:
        try:
            said = msgspec.convert(answer.found, _Said)
        except msgspec.ValidationError as error:
            why = f"it says what this version does not understand ({error})"
        else:
            # Its clock was read after the question and before the answer: in between it may be
            # right.
            then = begin if said.time is None else said.time
            ahead = min(then - begin, 0.0) + max(then - answer.received, 0.0)
            return _facts(host, said, ahead)
    if host.name not in here:
        return HostFacts(host.name, host.slots, replace(answer, why=why).silence(shell))
    silence = (
        f"Host {host.name}, which is this one, does not answer: {why}. Name a Python that "
        "finds this package with --python-interpreter."
    )
    return HostFacts(host.name, host.slots, silence)


def _facts(host: Host, said: _Said, ahead: float) -> HostFacts:
    """Reads an answer."""
    return HostFacts(
        host.name,
        host.slots,
        is_old=said.versions is None,
        name=said.name or host.name,
        versions=said.versions or {},
        cores=said.cores,
        gpus=said.gpus,
        has_folder=said.has_folder,
        ahead=None if said.time is None else ahead,
        obstacles=said.reasons,
    )
