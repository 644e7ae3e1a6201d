"""`tarantella run`: starts a script on several ranks and watches over them."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

from tarantella_pp.cli.io.quantities import positive_int, positive_seconds
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.launch import mpi_launchers

EPILOG = """\
exit codes: 0 all ranks finished; 2 usage; 75 stopped by SIGTERM; 124 --timeout; 130 Ctrl-C;
otherwise the exit code of the rank that failed first (128 + signal if it was killed, else 1)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella run`."""
    add = parser.add_argument
    add("-n", "--num-ranks", type=positive_int, metavar="N", help="number of ranks (default: 1)")
    add("--hostfile", metavar="F", help="hosts to run on, one per line; MPI's own format")
    add("--mpi", default="auto", choices=("auto", "mpich", "openmpi", "slurm"),
        help="MPI that starts the ranks (default: the one mpi4py loads)")  # fmt: skip
    add("--threads", type=positive_int, metavar="K",
        help="threads per rank (default: cores / ranks on a node)")  # fmt: skip
    add("--bind", default="auto", choices=("auto", "none"),
        help="give each rank cores of its own where the ranks' threads fill the node (default), "
        "or none")  # fmt: skip
    add("--share-gpus", action="store_true",
        help="let ranks of a host share its GPUs; by default each has one of its own")  # fmt: skip
    add("-x", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set an environment variable on all ranks; may be repeated")  # fmt: skip
    add("--log-level", default="WARNING", choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="of the library and of TensorFlow's native code (default: WARNING)")  # fmt: skip
    add("--output-on-all-devices", action="store_true",
        help="show what every rank prints, not only the last one")  # fmt: skip
    add("--trace", metavar="FILE",
        help="record training, for Perfetto and chrome://tracing")  # fmt: skip
    add("--fusion-threshold", metavar="BYTES",
        help="most bytes of gradients that replicas sum at a time, e.g. 32MiB")  # fmt: skip
    add("--timeout", type=positive_seconds, metavar="S", help="kill the job after S seconds")
    add("--dry-run", action="store_true", help="print the command and environment, run nothing")
    add("command", nargs=argparse.REMAINDER, metavar="[--] script.py ...",
        help="the script and its arguments; or `-- -m module ...`")  # fmt: skip
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the job.

    Raises:
        ConfigurationError: The script is missing, or an option is malformed.
        LaunchError: There is no MPI, or its launcher cannot be started.
    """
    from tarantella_pp.launch import mpi_launchers
    from tarantella_pp.launch.rank_environment import LOG_VARIABLE, parse_exports

    script = _script(arguments.command)
    exported = parse_exports(arguments.exports, os.environ)
    hosts = _hosts(arguments.hostfile)
    num_nodes = max(1, len(set(hosts)) or int(os.environ.get("SLURM_NNODES", "1")))
    num_ranks = arguments.num_ranks or _default_ranks(hosts)
    launcher = mpi_launchers.find_launcher(arguments.mpi)
    variables = _variables(arguments, num_ranks, num_nodes, exported)
    job = _job(arguments, script, num_ranks, num_nodes, [*variables, *exported])
    command = launcher.command(job)
    if arguments.dry_run:
        _show(command, variables, exported)
        return 0

    from tarantella_pp.launch.supervisor import Supervisor

    shared = num_nodes > 1 or bool(hosts)
    quiet = arguments.log_level in ("WARNING", "ERROR") and LOG_VARIABLE in variables
    supervisor = Supervisor(num_ranks, arguments.timeout, shared, quiet=quiet)
    of_launcher = launcher.environment(str(supervisor.directory.path))
    inherited = mpi_launchers.without_other_jobs(os.environ)
    return supervisor.run(command, {**inherited, **of_launcher, **variables, **exported})


def _variables(
    arguments: argparse.Namespace, num_ranks: int, num_nodes: int, exported: dict[str, str]
) -> dict[str, str]:
    """Returns the environment of the ranks, as far as it is not the user's."""
    from tarantella_pp.launch import rank_environment
    from tarantella_pp.launch.guard.gpus import SHARE_VARIABLE
    from tarantella_pp.launch.guard.launch_environment import FUSION_VARIABLE, TRACE_VARIABLE
    from tarantella_pp.partition.graph.units import parse_bytes

    given, forced = {**os.environ, **exported}, arguments.threads is not None
    threads = arguments.threads or rank_environment.threads_per_rank(
        num_ranks, num_nodes, os.environ
    )
    variables = rank_environment.rank_environment(
        threads,
        arguments.log_level,
        arguments.output_on_all_devices,
        given=given,
        force_threads=forced,
    )
    if arguments.bind == "auto":
        ranks = rank_environment.ranks_of_node(num_ranks, num_nodes)
        variables |= rank_environment.binding(threads, ranks, given, forced)
    else:
        variables |= rank_environment.UNBOUND
    if arguments.share_gpus:
        variables[SHARE_VARIABLE] = "1"
    if arguments.trace is not None:
        variables[TRACE_VARIABLE] = os.path.abspath(arguments.trace)
    if arguments.fusion_threshold is not None:
        size = parse_bytes(arguments.fusion_threshold, "--fusion-threshold")
        variables[FUSION_VARIABLE] = str(size)
    return variables


def _job(
    arguments: argparse.Namespace,
    script: list[str],
    num_ranks: int,
    num_nodes: int,
    names: list[str],
) -> mpi_launchers.Job:
    """Returns what the MPI launcher has to know."""
    from tarantella_pp.launch import mpi_launchers, rank_environment
    from tarantella_pp.launch.guard.rank_records import (
        DIRECTORY_VARIABLE,
        LOCAL_RANK_VARIABLE,
        RANK_VARIABLE,
        SIZE_VARIABLE,
    )

    of_job = {DIRECTORY_VARIABLE, SIZE_VARIABLE, RANK_VARIABLE, LOCAL_RANK_VARIABLE}
    return mpi_launchers.Job(
        command=(sys.executable, "-m", "tarantella_pp.launch.worker", *script),
        num_ranks=num_ranks,
        cores=rank_environment.cores_of_node(),
        cores_per_rank=rank_environment.threads_per_rank(num_ranks, num_nodes, os.environ),
        hostfile=arguments.hostfile,
        names=tuple(sorted({*names, *of_job})),
        label_output=arguments.output_on_all_devices,
    )


def _show(command: list[str], variables: dict[str, str], exported: dict[str, str]) -> None:
    """Prints what would be run; the values of `-x` are the user's own, and may be secret."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
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


def _hosts(hostfile: str | None) -> list[str]:
    """Returns the lines of the hostfile that name a host.

    Raises:
        ConfigurationError: It cannot be read, or has no host, or one that ssh takes for an
            option.
    """
    if hostfile is None:
        return []
    try:
        lines = pathlib.Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"Cannot read --hostfile {hostfile}: {error}") from error
    hosts = [line for line in (text.split("#")[0].strip() for text in lines) if line]
    wrong = [host for host in hosts if host.startswith("-")]
    if wrong or not hosts:
        raise ConfigurationError(
            f"--hostfile {hostfile}: expected host names. Received: {wrong or 'none'}"
        )
    return hosts


def _default_ranks(hosts: list[str]) -> int:
    """Returns the number of ranks when -n is not given: one per host, Slurm's tasks, or one."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    return len(hosts) or (int(tasks) if tasks.isdigit() else 1)
