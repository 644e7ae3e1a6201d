"""`tarantella run`: starts a script on several ranks and watches over them."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

from tarantella_pp.cli.io import job_options
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.launch import mpi_launchers
    from tarantella_pp.launch.hosts import HostRanks

add_arguments = job_options.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the job."""
    from tarantella_pp.launch import mpi_launchers, remote_hosts, slurm
    from tarantella_pp.launch.rank_environment import LOG_VARIABLE, parse_exports

    arguments = job_options.with_all_exports(arguments)
    job_options.check(arguments)
    script = _script(arguments.command)
    exported = parse_exports(arguments.exports, os.environ)
    hosts, num_ranks = _placement(arguments)
    launcher = mpi_launchers.find_launcher(arguments.mpi)
    per_node = _most_of_node(arguments, num_ranks, hosts)
    variables = _variables(arguments, per_node)
    inherited = mpi_launchers.without_other_jobs(slurm.beside_own_step(os.environ))
    environment = {**inherited, **variables, **exported}
    job = _job(arguments, script, num_ranks, per_node, hosts, environment)
    command = launcher.command(job)
    if arguments.dry_run:
        launcher.environment("", arguments.remote_shell)
        _show(command, hosts, variables, exported)
        return 0

    from tarantella_pp.launch.supervisor import Supervisor

    quiet = arguments.log_level in ("WARNING", "ERROR") and LOG_VARIABLE in variables
    others = remote_hosts.other_hosts(hosts, os.environ, job.options)
    with Supervisor(num_ranks, arguments.timeout, others, quiet=quiet) as supervisor:
        environment |= launcher.environment(supervisor.folder, arguments.remote_shell)
        if hosts:
            shell = launcher.remote_shell(environment)
            interpreter, whereabouts = _interpreter(arguments), supervisor.whereabouts
            remote_hosts.check(hosts, shell, interpreter, environment, whereabouts)
        return supervisor.run(command, environment)


def _placement(arguments: argparse.Namespace) -> tuple[tuple[HostRanks, ...], int]:
    """Returns the hosts with their ranks, if they are given, and the number of all ranks."""
    from tarantella_pp.launch import hosts, slurm

    per_node = arguments.n_per_node
    if arguments.hostfile is not None:
        found = hosts.read_hostfile(arguments.hostfile)
        placed = hosts.place(found, arguments.num_ranks, per_node)
        return placed, sum(host.count for host in placed)
    nodes = slurm.nodes(os.environ)
    default = slurm.tasks(os.environ) or 1
    ranks = arguments.num_ranks or (default if per_node is None else nodes * per_node)
    if per_node is not None and ranks > nodes * per_node:
        raise ConfigurationError(
            f"There is room for {nodes * per_node} ranks. "
            f"Received: -n {ranks} with --n-per-node={per_node} on {nodes} hosts"
        )
    return (), ranks


def _most_of_node(
    arguments: argparse.Namespace, num_ranks: int, hosts: tuple[HostRanks, ...]
) -> int:
    """Returns the most ranks of a host."""
    from tarantella_pp.launch import slurm

    if hosts:
        return max(host.count for host in hosts)
    if arguments.n_per_node is not None:
        return int(arguments.n_per_node)
    known = slurm.most_tasks(os.environ, num_ranks)
    return known or -(-num_ranks // slurm.nodes(os.environ))


def _variables(arguments: argparse.Namespace, per_node: int) -> dict[str, str]:
    """Returns the environment of the ranks, as far as it is not the user's."""
    from tarantella_pp.launch import rank_environment
    from tarantella_pp.launch.guard import core_binding
    from tarantella_pp.launch.guard.gpus import NONE_VISIBLE, SHARE_VARIABLE
    from tarantella_pp.launch.guard.launch_environment import FUSION_VARIABLE, TRACE_VARIABLE
    from tarantella_pp.launch.guard.rank_log import ALL_VARIABLE
    from tarantella_pp.partition.graph.units import parse_bytes

    exported = rank_environment.parse_exports(arguments.exports, os.environ)
    variables = rank_environment.rank_environment(
        arguments.log_level, arguments.output_on_all_devices, {**os.environ, **exported}
    )
    variables[core_binding.COUNT_VARIABLE] = str(arguments.threads or "")
    variables[core_binding.RANKS_VARIABLE] = str(per_node)
    variables[core_binding.BIND_VARIABLE] = _binding(arguments)
    variables[ALL_VARIABLE] = "1" if arguments.log_on_all_devices else "0"
    if arguments.share_gpus:
        variables[SHARE_VARIABLE] = "1"
    if arguments.no_gpu:
        variables |= NONE_VISIBLE
    if arguments.trace is not None:
        variables[TRACE_VARIABLE] = os.path.abspath(arguments.trace)
    if arguments.fusion_threshold is not None:
        size = parse_bytes(arguments.fusion_threshold, "--fusion-threshold")
        variables[FUSION_VARIABLE] = str(size)
    return variables


def _binding(arguments: argparse.Namespace) -> str:
    """Returns how ranks are bound."""
    from tarantella_pp.launch.guard import core_binding

    if arguments.pin_memory_to_socket:
        return core_binding.TO_MEMORY
    if arguments.pin_to_socket:
        return core_binding.TO_SOCKET
    return "" if arguments.bind == "none" else core_binding.TO_CORES


def _job(
    arguments: argparse.Namespace,
    script: list[str],
    num_ranks: int,
    per_node: int,
    hosts: tuple[HostRanks, ...],
    environment: dict[str, str],
) -> mpi_launchers.Job:
    """Returns what the MPI launcher has to know."""
    from tarantella_pp.launch import mpi_launchers, rank_environment
    from tarantella_pp.launch.channel.joining import HUB_VARIABLE, SECRET_VARIABLE
    from tarantella_pp.launch.channel.rank_records import (
        LOCAL_RANK_VARIABLE,
        RANK_VARIABLE,
        SIZE_VARIABLE,
    )
    from tarantella_pp.launch.guard import core_binding

    of_job = {SIZE_VARIABLE, RANK_VARIABLE, LOCAL_RANK_VARIABLE, HUB_VARIABLE, SECRET_VARIABLE}
    names = {*rank_environment.needed_elsewhere(environment), *of_job}
    names |= {option.partition("=")[0] for option in arguments.exports}
    return mpi_launchers.Job(
        command=(*_interpreter(arguments), "-m", "tarantella_pp.launch.worker", *script),
        num_ranks=num_ranks,
        cores=core_binding.cores_of_node(),
        cores_per_rank=rank_environment.threads_per_rank(per_node, os.environ),
        hosts=hosts,
        names=tuple(sorted(names)),
        label_output=arguments.output_on_all_devices,
        options=tuple(shlex.split(arguments.mpi_args or "")),
        per_node=arguments.n_per_node,
    )


def _interpreter(arguments: argparse.Namespace) -> list[str]:
    """Returns the command that runs Python on each rank."""
    return shlex.split(arguments.python_interpreter or "") or [sys.executable]


def _show(
    command: list[str],
    hosts: tuple[HostRanks, ...],
    variables: dict[str, str],
    exported: dict[str, str],
) -> None:
    """Prints what would be run; the values of `-x` are the user's own, and may be secret."""
    lines = [f"# {host}" for host in hosts]
    shown = {name: value for name, value in variables.items() if name not in exported}
    lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
    lines += [f"{name}=<from -x>" for name in sorted(exported)]
    sys.stdout.write("\n".join([*lines, shlex.join(command), ""]))


def _script(command: list[str]) -> list[str]:
    """Returns the script or `-m module` and its arguments, without the `--` before them."""
    script = command[1:] if command[:1] == ["--"] else command
    if script in ([], ["-m"]):
        raise ConfigurationError(
            "No script to run. Usage: tarantella -n 2 -- script.py ... or "
            "tarantella -n 2 -- -m module ..."
        )
    if script[0] == "-m":
        return script
    if not pathlib.Path(script[0]).is_file():
        raise ConfigurationError(f"There is no script {script[0]!r} in {os.getcwd()}.")
    return script
