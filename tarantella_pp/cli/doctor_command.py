"""`tarantella doctor`: what a job would find on this host, or on all of a hostfile.

Each host is asked what it has, others than this one through the remote shell. Then one job sends
messages between each two hosts, or between two ranks of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from tarantella_pp.cli.output import table, write_json, write_table
from tarantella_pp.cli.run_command import add_reach, interpreter_of
from tarantella_pp.dependencies import INSTALL
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import hosts, mpi_launchers
from tarantella_pp.partition.graph.units import count

# How long a host may take to answer, and how many are asked at once.
CONNECT_SECONDS, ANSWER_SECONDS, MOST_AT_ONCE = 10, 60.0, 128
# How long a job may take to start, to measure a pair of ranks, and to be ended.
START_SECONDS, PAIR_SECONDS, MORE_SECONDS = 40.0, 5.0, 100.0
# How long a rank may wait for a message: no link is so slow.
WAIT_SECONDS = 20.0
# What is compared, with what a table calls it.
VERSIONS = {
    "python": "Python",
    "tarantella_pp": "tarantella",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "MPI": "MPI",
}
_MISSING = {
    **INSTALL,
    "MPI": "mpi4py and an MPI library, as with `pip install mpi4py mpich`, or your site's module",
}
_NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
# Latency and bandwidth between two hosts.
Links = dict[tuple[str, str], dict[str, float]]


class HostFacts(msgspec.Struct, frozen=True):
    """What is known of a host: its line in the hostfile, and what it says of itself."""

    host: str
    slots: int | None = None
    silence: str = ""  # why it has not answered
    versions: dict[str, str | None] = {}
    cores: int = 0
    gpus: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella doctor`."""
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_reach(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if nothing is wrong."""
    problems, launcher = [], None
    try:
        launcher = mpi_launchers.find_launcher(arguments.mpi)
    except LaunchError as error:  # hosts are still asked what they have
        problems.append(str(error))
    if arguments.hostfile is None:
        lines, shell = [hosts.Host(socket.gethostname())], ["ssh"]
    else:
        lines, shell = [*hosts.read_hostfile(arguments.hostfile)], _shell(arguments, launcher)
    found = survey(lines, shell, interpreter_of(arguments))
    problems += host_findings(found)
    answered = [host for host in found if not host.silence]
    names = [host.host for host in answered] * (1 if arguments.hostfile else 2)
    links: Links = {}
    why = ""
    # Ranks find each other only with one MPI.
    if launcher and len(names) > 1 and len({host.versions.get("MPI") for host in answered}) == 1:
        links, why = measure_links(names, arguments)
    if why and arguments.hostfile is None:
        problems.append(f"Two ranks on this host do not run: {why}.")
    elif why:
        problems.append(
            f"Ranks on {', '.join(names)} do not all reach each other: {why}. Let connections "
            "between the hosts of a job pass the firewall, and name the network for MPI if there "
            "are several: UCX_NET_DEVICES=eth0 for MPICH, --mpi-args='--mca btl_tcp_if_include "
            "eth0' for Open MPI. A hostfile of two hosts says whether these two are the reason."
        )
    if arguments.json:
        measured = [{"hosts": pair, **link} for pair, link in links.items()]
        write_json({"hosts": msgspec.to_builtins(found), "links": measured, "problems": problems})
    else:
        between = [_table_of_links(links), ""] if links else []
        wrong = [f"- {problem}" for problem in problems or ["Nothing is wrong."]]
        write_table(_table_of_hosts(found), "", *between, *wrong)
    return 1 if problems else 0


def _shell(arguments: argparse.Namespace, launcher: mpi_launchers.Launcher | None) -> list[str]:
    """Returns the command that reaches other hosts."""
    if launcher is None:
        return shlex.split(arguments.remote_shell or "ssh")
    environment = {**os.environ, **launcher.environment("", arguments.remote_shell)}
    shell = launcher.remote_shell(environment)
    if not shell:
        raise ConfigurationError(
            "Hosts are asked through a remote shell, and this MPI starts its ranks without one. "
            f"Received: --hostfile={arguments.hostfile} with {launcher.executable}. Inside "
            "an allocation of Slurm leave --hostfile out, or name another MPI with --mpi."
        )
    return shell


def survey(
    lines: Sequence[hosts.Host], shell: Sequence[str], interpreter: Sequence[str]
) -> list[HostFacts]:
    """Asks hosts, all at once."""
    given = [f"{name}={os.environ[name]}" for name in _NEEDED if name in os.environ]
    command = ["env", *given, *interpreter, "-m", "tarantella_pp.cli.doctor_probe", "host"]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return list(pool.map(lambda line: _asked(line, shell, command), lines))


def _asked(line: hosts.Host, shell: Sequence[str], command: Sequence[str]) -> HostFacts:
    """Asks one host; this one needs no shell, and no shell may ask for a password."""
    here = hosts.is_here(line.name)
    if not here:
        options = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}"]
        options = options if shell[0] == "ssh" else []
        command = [*shell, *options, line.name, shlex.join(command)]
    try:
        code, printed, said = _ran(command, ANSWER_SECONDS)
    except OSError as error:
        raise LaunchError(
            f"Cannot start `{command[0]}`, which reaches other hosts: {error}. "
            "Install it, or name another one with --remote-shell."
        ) from error
    why = " ".join(said.split()).rstrip(".") or f"exit code {code}"
    if code is None:
        why = f"no answer within {ANSWER_SECONDS:g} s"
    elif code == 0:
        try:
            [facts] = _json_objects(printed)[-1:]
            return msgspec.convert({**facts, "host": line.name, "slots": line.slots}, HostFacts)
        except ValueError:  # none, or one of another version
            why = "no answer that this version understands"
    advice = "Name a Python that finds this package with --python-interpreter."
    if not here:
        advice = (
            f"`{shlex.join([*shell, line.name])}` must work without a password (another command is "
            "given with --remote-shell), and find this package there, in the same place or by "
            "--python-interpreter."
        )
    return HostFacts(
        line.name, line.slots, silence=f"Host {line.name} does not answer: {why}. {advice}"
    )


def _ran(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Returns exit code, output and errors of a command; no code if it had to be killed."""
    # Files, not pipes: processes that a killed job or a shared ssh leaves behind hold pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, env=environment, timeout=seconds, check=False, **files
            ).returncode
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return code, texts[0], texts[1]


def _json_objects(text: str) -> list[dict[str, Any]]:
    """Returns the lines that are objects of JSON; a shell may print others."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def host_findings(found: Sequence[HostFacts]) -> list[str]:
    """Returns a sentence for each thing that is wrong, with its host and what to do."""
    answered = [host for host in found if not host.silence]
    findings = [host.silence for host in found if host.silence]
    findings += [
        f"Host {host.host} has {count(host.cores, 'core')} for {host.slots} ranks: give its line "
        f"fewer, as in `{host.host}:{host.cores}`."
        for host in answered
        if (host.slots or 0) > host.cores
    ]
    for package in VERSIONS:
        findings += _of_versions(package, answered)
    without = [host.host for host in answered if not host.gpus]
    if without and any(host.gpus for host in answered):
        findings.append(
            f"No GPU on {', '.join(without)}, but on other hosts: all would wait for ranks without "
            "one. Leave these hosts out, or train on CPUs with --no-gpu."
        )
    return findings


def _of_versions(package: str, found: Sequence[HostFacts]) -> Iterator[str]:
    """Yields the hosts that lack a package, or have another version than the first that has it."""

    def compared(version: str) -> str:  # patches of Python need not agree
        return ".".join(version.split(".")[:2]) if package == "python" else version

    first = next((host for host in found if host.versions.get(package)), None)
    for host in found:
        version = host.versions.get(package)
        if version is None and package in _MISSING:
            yield f"Host {host.host} has no {package}: install it there: {_MISSING[package]}."
        elif first and version and compared(version) != compared(first.versions[package] or ""):
            name = "" if package == "MPI" else f"{package} "
            yield (
                f"Host {host.host} has {name}{version}, host {first.host} "
                f"{first.versions[package]}: install the same on all hosts, load the same module, "
                "or name one Python with --python-interpreter."
            )


def measure_links(names: Sequence[str], arguments: argparse.Namespace) -> tuple[Links, str]:
    """Has one job send messages between each two hosts; says why, if it came to no good end."""
    pairs = len(names) * (len(names) - 1) // 2
    seconds = START_SECONDS + PAIR_SECONDS * pairs
    if pairs > 10:
        sys.stderr.write(f"{pairs} links are measured, within {seconds:.0f} s if all work\n")
    reach = ("mpi", "remote_shell", "mpi_args", "python_interpreter")
    given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in reach}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    environment = {**os.environ, "TNT_TIMEOUT": f"{WAIT_SECONDS:g}", "TNT_WARN": "0"}
    with tempfile.TemporaryDirectory(prefix="tarantella-doctor-") as folder:
        where = ["-n", "2", "--share-gpus"]
        if arguments.hostfile is not None:
            path = pathlib.Path(folder, "hosts")
            path.write_text("".join(f"{name}:1\n" for name in names), encoding="utf-8")
            where = ["--hostfile", str(path), "--no-gpu"]
        # Started as a user would.
        run = [sys.executable, "-m", "tarantella_pp", "run", *where, *options]
        command = [*run, "--timeout", f"{seconds:g}", "--", "-m", "tarantella_pp.cli.doctor_probe"]
        code, printed, said = _ran(command, seconds + MORE_SECONDS, environment)
    links = {}
    for found in _json_objects(printed):
        if "pair" in found:
            first, second = found.pop("pair")
            links[names[first], names[second]] = found
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line.removeprefix("tarantella: ") for line in lines if line.startswith("tarantella: ")]
    why = " ".join(ours or lines[-1:]) or f"exit code {-9 if code is None else code}"
    return links, "" if code == 0 else why.rstrip(".")


def _table_of_hosts(found: Sequence[HostFacts]) -> Any:
    """A row for each host: its name, versions, cores, GPUs."""
    rows = []
    for host in found:
        versions = [host.versions.get(package) or "none" for package in VERSIONS]
        row = [host.host, *versions, str(host.cores), str(host.gpus)]
        rows.append([f"{host.host} (silent)", *"-" * (len(row) - 1)] if host.silence else row)
    names = ("host", *VERSIONS.values())
    return table((*names, "cores", "GPUs"), rows, left=names, folded=names, ruled=False)


def _table_of_links(links: Links) -> Any:
    """A row for each pair of hosts: latency and bandwidth of messages."""
    rows = [
        (*pair, f"{link['latency_us']:.4g} us", f"{link['bandwidth_gb_per_s']:.3g} GB/s")
        for pair, link in links.items()
    ]
    heads = ("host", "host", "latency", "bandwidth")
    return table(heads, rows, left=("host",), folded=("host",), ruled=False)
