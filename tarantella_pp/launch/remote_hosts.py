"""Other hosts, before a job starts on them: each is asked for its name, and tries the launcher."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch.channel import addresses
from tarantella_pp.launch.channel.joining import Whereabouts, unreachable
from tarantella_pp.launch.hosts import HostRanks

CONNECT_SECONDS = 10
LIMIT_SECONDS = 60.0
"""How long a host may take to answer."""
MOST_AT_ONCE = 128
"""Hosts that are asked at once: each takes files, of which a process may have 1,024 open."""
_OF_A_BATCH_SYSTEM = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE", "HYDRA_HOST_FILE")
"""Variables from which MPI takes hosts of its own accord."""
_NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_POLL_SECONDS = 0.02


def other_hosts(
    hosts: Sequence[HostRanks], environ: Mapping[str, str], options: Sequence[str] = ()
) -> list[str] | None:
    """Returns the names of other hosts with ranks, as far as they are known."""
    own = addresses.own_addresses()
    found = [host.name for host in hosts if not addresses.is_here(host.name, own)]
    unknown = bool(options) or any(name in environ for name in _OF_A_BATCH_SYSTEM)
    return found if found or (unknown and not hosts) else None


def check(
    hosts: Sequence[HostRanks],
    shell: Sequence[str],
    interpreter: Sequence[str],
    environ: Mapping[str, str],
    launcher: Whereabouts,
) -> None:
    """Makes sure that hosts can be reached, are different ones, and reach the launcher."""
    own = addresses.own_addresses()
    local = [host.name for host in hosts if addresses.is_here(host.name, own)]
    remote = [host.name for host in hosts if host.name not in local] if shell else []
    answers = ask(remote, shell, question(interpreter, environ, launcher))
    names = {host: socket.gethostname() for host in local}
    for host, answer in answers.items():
        names[host] = str(answer["name"])
        if answer["reasons"]:
            raise LaunchError(unreachable(host, answer["reasons"]))
    for one, name in names.items():
        for other in names:
            if one != other and names[other] == name:
                raise ConfigurationError(
                    "Give each host one line, with its number of ranks behind it, and a name of "
                    f"its own. Received: --hostfile with {one} and {other}, which both say that "
                    f"their name is {name}"
                )


def question(
    interpreter: Sequence[str], environ: Mapping[str, str], launcher: Whereabouts, folder: str = ""
) -> list[str]:
    """Returns the command that has a host say what it is."""
    given = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    command = ["env", *given, *interpreter, "-m", "tarantella_pp.launch.host_answer"]
    return [*command, str(launcher), *([folder] if folder else [])]


def ask(
    hosts: Sequence[str], shell: Sequence[str], command: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns what a command prints on each host, an object of JSON."""
    found = {}
    commands = {host: there(host, shell, command) for host in hosts}
    with contextlib.closing(answers_of(commands)) as answers:
        for answer in answers:
            if answer.found is None:
                raise LaunchError(answer.silence(shell))
            found[answer.host] = answer.found
    return {host: found[host] for host in hosts}


def there(host: str, shell: Sequence[str], command: Sequence[str]) -> list[str]:
    """Returns the command that runs another one on a host, and never asks for a password."""
    own = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}"]
    return [*shell, *(own if [*shell][:1] == ["ssh"] else []), host, shlex.join(command)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host has answered."""

    host: str
    found: dict[str, Any] | None
    why: str
    received: float

    def silence(self, shell: Sequence[str]) -> str:
        """Returns what to say and do where it did not answer."""
        command, why = shlex.join([*shell, self.host]), self.why.rstrip(".")
        return (
            f"Host {self.host} of --hostfile does not answer: {why}. `{command}` must work "
            "without a password (another command than that is given with --remote-shell), and "
            "find this package there, in the same place or by --python-interpreter."
        )


def answers_of(commands: Mapping[str, Sequence[str]]) -> Generator[Answer]:
    """Asks many hosts at once, and yields each answer when it is there, or is late."""
    asked: list[_Question] = []
    left = [*commands.items()]
    try:
        while left or asked:
            while left and len(asked) < MOST_AT_ONCE:
                asked.append(_Question(*left.pop(0)))
            ready = [question for question in asked if question.is_over()]
            for question in ready:
                yield question.answer()
                question.end()
                asked.remove(question)
            time.sleep(0 if ready else _POLL_SECONDS)
    finally:
        for question in asked:
            question.end()


class _Question:
    """A host that is being asked.

    What it says goes to files: a process that a shell leaves in the background, as ssh does to
    share its connection, would hold a pipe open.
    """

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self._host = host
        self._deadline = time.monotonic() + LIMIT_SECONDS
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`end` closes them)
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot start `{command[0]}`, which reaches other hosts: {error}. "
                "Install it, or name another one with --remote-shell."
            ) from error

    def is_over(self) -> bool:
        """Whether nothing more is to come, or is waited for."""
        return self._process.poll() is not None or time.monotonic() > self._deadline

    def answer(self) -> Answer:
        """Returns what the host has answered so far."""
        now, code = time.time(), self._process.poll()
        if code is None:
            return Answer(self._host, None, f"no answer within {LIMIT_SECONDS:g} s", now)
        found = _last_object(self._read(self._out))
        if code == 0 and found is not None:
            return Answer(self._host, found, "", now)
        said = " ".join(self._read(self._err).split())
        reason = f"exit code {code}" if code else "no answer in what it has printed"
        return Answer(self._host, None, said or reason, now)

    def end(self) -> None:
        """Ends it, if it has not."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()

    def _read(self, file: IO[bytes]) -> str:
        file.seek(0)
        return file.read().decode(errors="replace")


def _last_object(text: str) -> dict[str, Any] | None:
    """Returns the last line that is an object of JSON; a shell may print something, too."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None
