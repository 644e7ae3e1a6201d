"""`tarantella doctor --hostfile`: what a job would find on its hosts, before it is started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from typing import Any

import msgspec

from tarantella_pp.cli.doctor import (
    host_findings,
    host_survey,
    host_tables,
    link_survey,
    probe_job,
)
from tarantella_pp.cli.doctor.host_survey import HostFacts
from tarantella_pp.cli.doctor.link_survey import MeasuredLinks
from tarantella_pp.cli.io.output import write_json, write_table
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import hosts, mpi_launchers
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if nothing is wrong."""
    lines = hosts.read_hostfile(arguments.hostfile)
    shell, findings = _shell(arguments)
    has_mpi = not findings
    interpreter = shlex.split(arguments.python_interpreter or "") or [sys.executable]
    here, found = host_survey.this_host(), host_survey.survey(lines, shell, interpreter)
    findings += host_findings.host_findings(here, found)
    compute, links = arguments.save is not None, MeasuredLinks()
    ready = host_findings.usable(here, found) if has_mpi else []
    if len(ready) > 1:
        links = link_survey.measure_links(ready, arguments, compute=compute)
        findings += links.findings()
    machine = _machine(links, len(found))
    if compute and machine is None:
        why = links.why or "that needs the links between all hosts, which are two at least"
        findings.append(f"{arguments.save} was not written: {why.rstrip('.')}.")
    elif compute and machine is not None:
        machine.save(arguments.save)
    _show(arguments, found, links, machine, findings)
    return 1 if findings else 0


def _machine(links: MeasuredLinks, num_hosts: int) -> HardwareSpec | None:
    """Returns the machine that was measured, if all links between the hosts were."""
    if not links.rank or len(links.links) < num_hosts * (num_hosts - 1) // 2:
        return None
    return probe_job.machine_of_ranks(links.rank, list(links.links.values()))


def _show(
    arguments: argparse.Namespace,
    found: list[HostFacts],
    links: MeasuredLinks,
    machine: HardwareSpec | None,
    findings: list[str],
) -> None:
    """Prints tables, or JSON."""
    if arguments.json:
        told = [{"hosts": pair, **dataclasses.asdict(link)} for pair, link in links.links.items()]
        write_json(
            {
                "hosts": [dataclasses.asdict(host) for host in found],
                "links": told,
                "machine": machine and msgspec.to_builtins(machine),
                "problems": findings,
            }
        )
        return
    parts: list[Any] = [host_tables.table_of_hosts(found)]
    if links.links or links.dead:
        parts += ["", host_tables.table_of_links(links)]
    lines = [f"- {finding}" for finding in findings or ["Nothing is wrong."]]
    write_table(*parts, "", *lines)


def _shell(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns the command that reaches other hosts, and why a job could not use it."""
    given = shlex.split(arguments.remote_shell or "")
    try:
        launcher = mpi_launchers.find_launcher(arguments.mpi)
    except LaunchError as error:
        return given or ["ssh"], [str(error)]
    environment = {**os.environ, **launcher.environment("", arguments.remote_shell)}
    shell = launcher.remote_shell(environment)
    if not shell:
        raise ConfigurationError(
            "Hosts are asked through a remote shell, and this MPI starts its ranks without one. "
            f"Received: --hostfile={arguments.hostfile} with {launcher.executable}. Inside "
            "an allocation of Slurm leave --hostfile out, or name another MPI with --mpi."
        )
    return shell, []
