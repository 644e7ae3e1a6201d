"""`tarantella doctor`: what a job would find on this host, or on all of a hostfile.

It starts one job as a user would, with a rank on each host, or two on this one. Each rank says what
its host has before it starts MPI; then each of them sends messages to the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tarantella_pp.cli.output import table, write_table
from tarantella_pp.cli.run_command import add_reach
from tarantella_pp.errors import INSTALL
from tarantella_pp.launch import hosts
from tarantella_pp.launch.resources import this_host
from tarantella_pp.partition.graph.units import count

# How long the job may take, and how long a rank may wait for a message: no link is so slow.
JOB_SECONDS, WAIT_SECONDS = 90, 20
# What is compared, with what a table calls it.
VERSIONS = {
    "python": "Python", "tarantella_pp": "tarantella", "tensorflow": "TensorFlow", "keras": "Keras",
    "MPI": "MPI",
}  # fmt: skip
_MISSING = {
    **INSTALL,
    "MPI": "mpi4py and an MPI library, as with `pip install mpi4py mpich`, or your site's module",
}
_NETWORK = (
    "Let connections between the hosts of a job pass the firewall, and name the network for MPI if "
    "there are several: UCX_NET_DEVICES=eth0 for MPICH, --mpi-args='--mca btl_tcp_if_include eth0' "
    "for Open MPI. A hostfile of two hosts says whether these two are the reason."
)


class HostFacts(msgspec.Struct, frozen=True):
    """What is known of a host: its line in the hostfile, and what its rank says of it."""

    host: str
    slots: int | None = None
    versions: dict[str, str | None] = {}  # empty where no rank has started
    cores: int = 0
    gpus: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella doctor`."""
    parser.set_defaults(run=run)
    add_reach(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if nothing is wrong."""
    alone = arguments.hostfile is None
    here = hosts.Host(socket.gethostname())
    lines = (here,) if alone else hosts.read_hostfile(arguments.hostfile)
    told, why = _examined(lines, arguments)
    facts = {one["rank"]: one for one in told if "rank" in one}
    if alone:
        facts[0] = this_host()
    found = [
        msgspec.convert({**facts.get(rank, {}), "host": line.name, "slots": line.slots}, HostFacts)
        for rank, line in enumerate(lines)
    ]
    problems = host_findings(found)
    if why and alone:
        problems.append(f"Two ranks on this host do not run: {why}.")
    elif why:
        names = ", ".join(host.host for host in found)
        silent = ", ".join(host.host for host in found if not host.versions)
        what = f" (no rank has come up on {silent})" if silent else ""
        problems.append(f"Ranks on {names} do not all reach each other{what}: {why}. {_NETWORK}")
    links = [
        f"Messages: {one['bandwidth'] / 1e9:.2f} GB/s after {one['latency'] * 1e6:.1f} us."
        for one in told
        if "bandwidth" in one
    ]
    wrong = [f"- {problem}" for problem in problems or ["Nothing is wrong."]]
    write_table(_table_of_hosts(found), "", *links, *wrong)
    return 1 if problems else 0


def _examined(
    lines: Sequence[hosts.Host], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """Runs the job; returns what its ranks say, and why it came to no good end, if it did not."""
    reach = ("mpi", "remote_shell", "mpi_args", "python_interpreter")
    given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in reach}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    environment = {**os.environ, "TNT_TIMEOUT": str(WAIT_SECONDS), "TNT_WARN": "0"}
    with tempfile.TemporaryDirectory(prefix="tarantella-doctor-") as folder:
        path = pathlib.Path(folder)
        where = ["-n", "2", "--share-gpus"]
        if arguments.hostfile is not None:
            hostfile = path / "hosts"
            hostfile.write_text("".join(f"{line.name}:1\n" for line in lines), encoding="utf-8")
            where = ["--hostfile", str(hostfile), "--no-gpu"]
        command = [sys.executable, "-m", "tarantella_pp", "run", *where, *options]
        command += ["--output-on-all-devices", "--timeout", str(JOB_SECONDS)]
        command += ["--", "-m", "tarantella_pp.runtime.comm.machine"]
        # Files, not pipes: an ssh that several commands share may hold a pipe open.
        with (path / "out").open("wb") as out, (path / "err").open("wb") as errors:
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                check=False,
            ).returncode  # fmt: skip
        printed, said = ((path / name).read_text(errors="replace") for name in ("out", "err"))
    told = list(_json_objects(printed))
    messages = [line.strip() for line in said.splitlines() if any(map(str.isalpha, line))]
    ours = [line.partition(": ")[2] for line in messages if line.startswith("tarantella")]
    others = [line for line in messages if not line.startswith("tarantella")]
    if ours and not told:  # MPI and ssh say more than our launcher knows, ssh before
        ours = [*sorted(others, key=lambda line: line.startswith("[mpiexec"))[:1], *ours]
    why = " ".join(ours or others[-1:]) or f"exit code {code}"
    return told, "" if code == 0 else why.rstrip(".")


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields what lines have of JSON; MPI writes the rank before it, and a shell other lines."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line[line.index("{") :])


def host_findings(found: Sequence[HostFacts]) -> list[str]:
    """Returns a sentence for each thing that is wrong, with its host and what to do."""
    answered = [host for host in found if host.versions]
    findings = [
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


def _table_of_hosts(found: Sequence[HostFacts]) -> Any:
    rows = []
    for host in found:
        versions = [host.versions.get(package) or "none" for package in VERSIONS]
        row = [host.host, *versions, str(host.cores), str(host.gpus)]
        rows.append(row if host.versions else [f"{host.host} (silent)", *"-" * (len(row) - 1)])
    names = ("host", *VERSIONS.values())
    return table((*names, "cores", "GPUs"), rows, left=names, folded=names, ruled=False)
