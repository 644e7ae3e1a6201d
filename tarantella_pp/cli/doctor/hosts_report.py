"""`tarantella doctor --hostfile`: what a job would find on its hosts, before it is started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys

from tarantella_pp.cli.doctor import host_findings, host_survey
from tarantella_pp.cli.io.output import write_json, write_table
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import hosts, mpi_launchers


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if nothing is wrong.

    Raises:
        ConfigurationError: The hostfile is malformed, or MPI reaches hosts without a shell.
        LaunchError: The remote shell cannot be started.
    """
    lines = hosts.read_hostfile(arguments.hostfile)
    shell, findings = _shell(arguments)
    interpreter = shlex.split(arguments.python_interpreter or "") or [sys.executable]
    here, found = host_survey.this_host(), host_survey.survey(lines, shell, interpreter)
    findings += host_findings.host_findings(here, found)
    if arguments.json:
        told = [dataclasses.asdict(host) for host in found]
        write_json({"hosts": told, "problems": findings})
    else:
        from tarantella_pp.cli.doctor import host_tables

        write_table(host_tables.table_of_hosts(found), *_lines(findings))
    return 1 if findings else 0


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


def _lines(findings: list[str]) -> list[str]:
    """Returns the findings as they are printed."""
    return (
        ["", *(f"- {finding}" for finding in findings)] if findings else ["", "Nothing is wrong."]
    )
