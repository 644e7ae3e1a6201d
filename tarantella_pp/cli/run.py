"""`tarantella run`: starts a script on several ranks and watches over them."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import sys

from tarantella_pp.errors import LaunchError

EPILOG = """\
exit codes: 0 all ranks finished; 2 usage; 75 stopped by SIGTERM; 124 --timeout; 130 Ctrl-C;
otherwise the exit code of the rank that failed first (128 + signal if it was killed, else 1)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella run`."""
    add = parser.add_argument
    add("-n", "--num-ranks", type=_positive_int, metavar="N", help="number of ranks (default: 1)")
    add("--hostfile", metavar="F", help="hosts to run on, one per line; MPI's own format")
    add("--mpi", default="auto", choices=("auto", "mpich", "openmpi", "slurm"),
        help="MPI that starts the ranks (default: the one mpi4py loads)")  # fmt: skip
    add("--threads", type=_positive_int, metavar="K",
        help="threads per rank (default: cores / ranks on a node)")  # fmt: skip
    add("-x", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set an environment variable on all ranks; may be repeated")  # fmt: skip
    add("--log-level", default="WARNING", choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="of the library and of TensorFlow's native code (default: WARNING)")  # fmt: skip
    add("--output-on-all-devices", action="store_true",
        help="show what every rank prints, not only the last one")  # fmt: skip
    add("--timeout", type=_positive_float, metavar="S", help="kill the job after S seconds")
    add("--dry-run", action="store_true", help="print the command and environment, run nothing")
    add("command", nargs=argparse.REMAINDER, metavar="[--] script.py ...",
        help="the script and its arguments")  # fmt: skip
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the job.

    Raises:
        LaunchError: The script or an MPI is missing, or the MPI launcher cannot be started.
        ConfigurationError: An option is malformed.
    """
    from tarantella_pp.cli import environment, mpi

    script = _script(arguments.command)
    num_ranks = arguments.num_ranks or _default_ranks(arguments.hostfile)
    launcher = mpi.find_launcher(arguments.mpi)
    hosts = _hosts(arguments.hostfile)
    num_nodes = max(1, len(hosts) or int(os.environ.get("SLURM_NNODES", "1")))
    threads = arguments.threads or environment.threads_per_rank(num_ranks, num_nodes, os.environ)
    ours = environment.rank_environment(
        threads,
        arguments.log_level,
        arguments.output_on_all_devices,
        given=os.environ,
        exported=environment.parse_exports(arguments.exports, os.environ),
        force_threads=arguments.threads is not None,
    )
    from tarantella_pp.runtime.records import DIRECTORY_VARIABLE, SIZE_VARIABLE

    job = mpi.Job(
        command=(sys.executable, "-m", "tarantella_pp.cli.worker", *script),
        num_ranks=num_ranks,
        cores=environment.cores_of_node(),
        hostfile=arguments.hostfile,
        names=(*sorted(ours), DIRECTORY_VARIABLE, SIZE_VARIABLE),
        label_output=arguments.output_on_all_devices,
    )
    command = launcher.command(job)
    if arguments.dry_run:
        for name, value in sorted(ours.items()):
            sys.stdout.write(f"{name}={shlex.quote(value)}\n")
        sys.stdout.write(f"{shlex.join(command)}\n")
        return 0

    from tarantella_pp.cli.supervise import Supervisor

    supervisor = Supervisor(num_ranks, arguments.timeout, shared=num_nodes > 1)
    own = launcher.environment(str(supervisor.directory.path))
    return supervisor.run(command, {**os.environ, **own, **ours})


def _script(command: list[str]) -> list[str]:
    """Returns the script and its arguments, without the `--` before them."""
    script = command[1:] if command[:1] == ["--"] else command
    if not script:
        raise LaunchError("No script to run. Usage: tarantella -n 2 -- script.py arguments...")
    if not pathlib.Path(script[0]).is_file():
        raise LaunchError(f"There is no script {script[0]!r} in {os.getcwd()}.")
    return script


def _hosts(hostfile: str | None) -> list[str]:
    """Returns the lines of the hostfile that name a host.

    Raises:
        LaunchError: It cannot be read, names no host, or a name that ssh would take for an option.
    """
    if hostfile is None:
        return []
    try:
        lines = pathlib.Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LaunchError(f"Cannot read --hostfile {hostfile}: {error}") from error
    hosts = [line for line in (text.split("#")[0].strip() for text in lines) if line]
    wrong = [host for host in hosts if host.startswith("-")]
    if wrong or not hosts:
        raise LaunchError(
            f"--hostfile {hostfile}: expected host names. Received: {wrong or 'none'}"
        )
    return hosts


def _default_ranks(hostfile: str | None) -> int:
    """Returns the number of ranks when -n is not given: Slurm's tasks, one per host, or one."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdigit() else len(_hosts(hostfile)) or 1


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive. Received: {text}")
    return value
