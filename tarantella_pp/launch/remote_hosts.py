"""Other hosts, before a job starts on them: each is asked for its name, and tries the launcher."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch.channel import addresses
from tarantella_pp.launch.channel.joining import Whereabouts, unreachable
from tarantella_pp.launch.hosts import HostRanks

CONNECT_SECONDS = 10
LIMIT_SECONDS = 60.0
"""How long a host may take to answer."""
_OF_A_BATCH_SYSTEM = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE", "HYDRA_HOST_FILE")
"""Variables from which MPI takes hosts of its own accord."""
_NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def other_hosts(
    hosts: Sequence[HostRanks], environ: Mapping[str, str], options: Sequence[str] = ()
) -> list[str] | None:
    """Returns the names of other hosts with ranks, as far as they are known.

    Args:
        hosts: The hosts of the hostfile.
        environ: The environment of the launcher.
        options: What the user has told the MPI's launcher, which may be hosts.

    Returns:
        The names, or None if all ranks run on this host.
    """
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
    """Makes sure that hosts can be reached, are different ones, and reach the launcher.

    Args:
        hosts: The hosts.
        shell: The command that reaches one, such as `ssh`. None are asked without it.
        interpreter: The command of Python there.
        environ: The environment of the ranks.
        launcher: Where the launcher listens.

    Raises:
        LaunchError: A host cannot be reached, has no such Python, or does not reach the launcher.
        ConfigurationError: Two names are those of one host.
    """
    own = addresses.own_addresses()
    local = [host.name for host in hosts if addresses.is_here(host.name, own)]
    remote = [host.name for host in hosts if host.name not in local] if shell else []
    given = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    command = ["env", *given, *interpreter, "-m", "tarantella_pp.launch.host_answer"]
    answers = ask(remote, shell, [*command, str(launcher)])
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


def ask(
    hosts: Sequence[str], shell: Sequence[str], command: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns what a command prints on each host, an object of JSON; all are asked at once.

    Args:
        hosts: Their names.
        shell: The command that reaches one.
        command: The command there.

    Raises:
        LaunchError: One has not answered.
    """
    options = [f"-oConnectTimeout={CONNECT_SECONDS}"] if [*shell][:1] == ["ssh"] else []
    questions: list[_Question] = []
    try:
        questions.extend(
            _Question(host, shell, _started([*shell, *options, host, shlex.join(command)]))
            for host in hosts
        )
        deadline = time.monotonic() + LIMIT_SECONDS
        return {question.host: question.answer(deadline) for question in questions}
    except OSError as error:
        raise LaunchError(
            f"Cannot start `{shlex.join(shell)}`, which reaches other hosts: {error}. "
            "Install it, or name another one with --remote-shell."
        ) from error
    finally:
        for question in questions:
            with contextlib.suppress(OSError):
                question.process.kill()
            question.process.communicate()


@dataclass(frozen=True, slots=True)
class _Question:
    """A host that is being asked."""

    host: str
    shell: Sequence[str]
    process: subprocess.Popen[str]

    def answer(self, deadline: float) -> dict[str, Any]:
        """Returns what the host has answered."""
        try:
            seconds = max(0.1, deadline - time.monotonic())
            out, said = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._refuse(f"no answer within {LIMIT_SECONDS:g} s")
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            found = None
        if self.process.returncode != 0 or not isinstance(found, dict):
            self._refuse(" ".join(said.split()) or f"exit code {self.process.returncode}")
        return found

    def _refuse(self, why: str) -> NoReturn:
        command = shlex.join([*self.shell, self.host])
        raise LaunchError(
            f"Host {self.host} of --hostfile does not answer: {why}. `{command}` must work without "
            "a password (another command than that is given with --remote-shell), and find this "
            "package there, in the same place or by --python-interpreter."
        )


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
