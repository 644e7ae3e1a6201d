"""`tarantella run`: starts a script on several ranks and watches over them."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tarantella_pp.cli.inputs import positive_int, positive_seconds, shell_words
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.launch.hosts import Host, HostRanks
    from tarantella_pp.launch.mpi_launchers import Launcher
    from tarantella_pp.launch.run_job import Attempt

EPILOG = """\
exit codes: 0 all ranks finished; 2 usage; 75 stopped by SIGTERM; 124 --timeout; 130 Ctrl-C;
otherwise the exit code of the rank that failed first (128 + signal if it was killed, else 1)."""
_PYTHON = re.compile(r"(.*/)?python[\d.]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella run`."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("-n", "-np", "--num-ranks", type=positive_int, metavar="N",
        help="number of ranks (default: 1)")  # fmt: skip
    add("--n-per-node", "--devices-per-node", type=positive_int, metavar="K",
        help="most ranks of a host; without -n, as many on each")  # fmt: skip
    add_reach(parser)
    add("--threads", type=positive_int, metavar="K",
        help="threads per rank (default: cores of its host / ranks on it)")  # fmt: skip
    add("--bind", choices=("auto", "none"),
        help="give each rank cores of its own where the ranks' threads fill the node (default), "
        "or none")  # fmt: skip
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument("--share-gpus", action="store_true",
        help="let ranks of a host share its GPUs; by default each has one of its own")  # fmt: skip
    gpus.add_argument("--no-gpu", "--no-gpus", action="store_true", help="train on CPUs only")
    add("-x", "--setenv", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set an environment variable on all ranks; may be repeated")  # fmt: skip
    add("--log-level", default="WARNING", choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="of the library and of TensorFlow's native code (default: WARNING)")  # fmt: skip
    add("--log-on-all-devices", action="store_true",
        help="with --log-level INFO or DEBUG, show what the library logs on every rank, not only "
        "on rank 0; warnings are always shown")  # fmt: skip
    add("--output-on-all-devices", action="store_true",
        help="show what every rank prints, not only the last one")  # fmt: skip
    add("--trace", metavar="FILE",
        help="record training, for Perfetto and chrome://tracing")  # fmt: skip
    add("--timeout", type=positive_seconds, metavar="S", help="kill the job after S seconds")
    add("--restarts", type=positive_int, default=0, metavar="N",
        help="start a job that fails again, at most N times, on the hosts that still answer; `fit` "
        "must have a Checkpoint, from which it goes on")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print hosts, environment and command, run nothing")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, metavar="[--] script.py ...",
        help="the script and its arguments; or `-- -m module ...`")  # fmt: skip
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_reach(parser: argparse.ArgumentParser) -> None:
    """Adds what says on which hosts ranks run, and how they are reached."""
    add = parser.add_argument
    add("--hostfile", metavar="F",
        help="hosts to run on, one per line: `host`, `host:4` or `host slots=4`")  # fmt: skip
    add("--mpi", default="auto", choices=("auto", "mpich", "openmpi", "slurm"),
        help="MPI that starts the ranks (default: the one mpi4py loads)")  # fmt: skip
    add("--remote-shell", metavar="CMD", type=shell_words,
        help="what reaches other hosts, e.g. 'ssh -p 2222' (default: ssh)")  # fmt: skip
    add("--mpi-args", metavar="ARGS", type=shell_words,
        help="further options for the MPI's own launcher")  # fmt: skip
    add("--python-interpreter", metavar="CMD", type=shell_words,
        help="what runs the script on each rank (default: this Python)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the job."""
    from tarantella_pp.launch import environment, hosts, mpi_launchers
    from tarantella_pp.launch.processes import job_folder
    from tarantella_pp.launch.run_job import run_job

    arguments.command = _script(arguments.command)
    arguments.exports = environment.parse_exports(arguments.exports, os.environ)
    found: Sequence[Host] = ()
    if arguments.hostfile is not None:
        lines = hosts.read_hostfile(arguments.hostfile)
        found = hosts.with_room(lines, arguments.num_ranks, arguments.n_per_node)
    launcher = mpi_launchers.find_launcher(arguments.mpi)
    if arguments.dry_run:
        _show(arguments, _attempt(arguments, launcher, found, ""))
        return 0
    with job_folder() as folder:
        attempts = _attempts(arguments, launcher, found, folder)
        shows = {**os.environ, **arguments.exports}.get(environment.LOG_VARIABLE) == "0"
        quiet = not shows and arguments.log_level in ("WARNING", "ERROR")
        restarts, timeout = arguments.restarts, arguments.timeout
        return run_job(launcher, attempts, restarts=restarts, timeout=timeout, quiet=quiet)


def _attempts(
    arguments: argparse.Namespace, launcher: Launcher, found: Sequence[Host], folder: str
) -> Iterator[Attempt]:
    """Yields the job, then again on the hosts that still answer, if it has any."""
    from tarantella_pp.launch import hosts

    attempt = _attempt(arguments, launcher, found, folder)
    asked, shell = attempt.num_ranks, launcher.shell(attempt.environment)
    yield attempt
    while (left := hosts.that_answer(found, shell) if shell else found) or not found:
        yield _attempt(arguments, launcher, left, folder, asked)


def _attempt(
    arguments: argparse.Namespace,
    launcher: Launcher,
    found: Sequence[Host],
    folder: str,
    asked: int | None = None,
) -> Attempt:
    """Returns the job on some hosts, with at most as many ranks as were asked for."""
    from tarantella_pp.launch import environment, mpi_launchers, resources
    from tarantella_pp.launch.records import LOCAL_RANK_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE
    from tarantella_pp.launch.run_job import Attempt

    placed, num_ranks, per_node = _placement(arguments, found)
    variables = _variables(arguments, per_node, asked or num_ranks)
    # Started inside another job (salloc, mpiexec), ranks would take its variables for their own.
    given = {**mpi_launchers.without_other_jobs(os.environ), **variables, **arguments.exports}
    # MPI hands on only what it is given by name, and other hosts start from a bare login shell.
    names = {*environment.needed_elsewhere(given), *arguments.exports}
    names |= {SIZE_VARIABLE, RANK_VARIABLE, LOCAL_RANK_VARIABLE}
    interpreter = shlex.split(arguments.python_interpreter or "") or [sys.executable]
    # MPI's launchers begin another program at ":", so all words of colons get one more on the way.
    words = (f":{word}" if word and not word.strip(":") else word for word in arguments.command)
    job = mpi_launchers.Job(
        command=(*interpreter, "-m", "tarantella_pp.launch.worker", *words),
        num_ranks=num_ranks,
        cores_per_rank=resources.threads_per_rank(per_node, os.environ),
        hosts=placed,
        names=tuple(sorted(names)),
        label_output=arguments.output_on_all_devices,
        options=tuple(shlex.split(arguments.mpi_args or "")),
        per_node=arguments.n_per_node,
    )
    own = launcher.environment(folder, arguments.remote_shell)
    return Attempt(launcher.command(job), given | own, num_ranks, placed, variables)


def _placement(
    arguments: argparse.Namespace, found: Sequence[Host]
) -> tuple[tuple[HostRanks, ...], int, int]:
    """Returns the hosts with their ranks, if they are given, all ranks, and the most of a host."""
    from tarantella_pp.launch import hosts
    from tarantella_pp.launch.mpi_launchers import slurm_hosts, slurm_tasks

    per_node = arguments.n_per_node
    if found:
        placed = hosts.place(found, arguments.num_ranks)
        counts = [len(host.ranks) for host in placed]
        return placed, sum(counts), max(counts)
    nodes = slurm_hosts(os.environ)
    default = slurm_tasks(os.environ) or 1
    ranks = arguments.num_ranks or (default if per_node is None else nodes * per_node)
    if per_node is not None and ranks > nodes * per_node:
        raise ConfigurationError(
            f"There is room for {nodes * per_node} ranks. "
            f"Received: -n {ranks} with --n-per-node={per_node} on {nodes} hosts"
        )
    return (), ranks, per_node or -(-ranks // nodes)


def _variables(arguments: argparse.Namespace, per_node: int, asked: int) -> dict[str, str]:
    """Returns the environment of the ranks, as far as it is not the user's."""
    from tarantella_pp.launch import environment, resources
    from tarantella_pp.launch.records import RESTARTS_VARIABLE

    given = {**os.environ, **arguments.exports}
    variables = environment.rank_environment(arguments.log_level, given) | {
        resources.COUNT_VARIABLE: str(arguments.threads or ""),
        resources.RANKS_VARIABLE: str(per_node),
        resources.BIND_VARIABLE: "" if arguments.bind == "none" else "cores",
        environment.LOG_LEVEL_VARIABLE: arguments.log_level,
        environment.LOG_ALL_VARIABLE: "1" if arguments.log_on_all_devices else "0",
        environment.OUTPUT_VARIABLE: "1" if arguments.output_on_all_devices else "0",
        RESTARTS_VARIABLE: str(asked) if arguments.restarts else "",
        "TNT_TERMINAL": os.environ.get("TNT_TERMINAL", str(int(sys.stdout.isatty()))),
    }
    if arguments.share_gpus:
        variables[resources.SHARE_VARIABLE] = "1"
    if arguments.no_gpu:
        variables |= resources.NONE_VISIBLE
    if arguments.trace is not None:
        variables["TNT_TRACE"] = os.path.abspath(arguments.trace)  # which our callbacks read
    return variables


def _show(arguments: argparse.Namespace, attempt: Attempt) -> None:
    """Prints what would be run; the values of `-x` are the user's own, and may be secret."""
    lines = [f"# {host}" for host in attempt.hosts]
    shown = attempt.variables.keys() - arguments.exports.keys()
    lines += [f"{name}={shlex.quote(attempt.variables[name])}" for name in sorted(shown)]
    lines += [f"{name}=<from -x>" for name in sorted(arguments.exports)]
    sys.stdout.write("\n".join([*lines, shlex.join(attempt.command), ""]))


def without_dashes(command: list[str]) -> list[str]:
    """Returns what stands after the options, without the `--` between."""
    return command[1:] if command[:1] == ["--"] else command


def _script(command: list[str]) -> list[str]:
    """Returns the script or `-m module` and its arguments, without the `--` before them."""
    script = without_dashes(command)
    if script in ([], ["-m"]):
        raise ConfigurationError(
            "No script to run. Usage: tarantella -n 2 -- script.py ... or "
            "tarantella -n 2 -- -m module ..."
        )
    if script[0] == "-m":
        return script
    if _PYTHON.fullmatch(script[0]):
        raise ConfigurationError(
            f"Leave out {script[0]}: ranks run this Python, or another with --python-interpreter. "
            f"Received: {shlex.join(script)}"
        )
    if not pathlib.Path(script[0]).is_file():
        raise ConfigurationError(
            f"There is no script {script[0]!r} in {os.getcwd()}, and no command of that name: see "
            "`tarantella --help`."
        )
    return script
