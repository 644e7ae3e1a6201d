"""The options of `tarantella run`."""

from __future__ import annotations

import argparse
import re

from tarantella_pp.cli.io.quantities import positive_int, positive_seconds
from tarantella_pp.errors import ConfigurationError

EPILOG = """\
exit codes: 0 all ranks finished; 2 usage; 75 stopped by SIGTERM; 124 --timeout; 130 Ctrl-C;
otherwise the exit code of the rank that failed first (128 + signal if it was killed, else 1)."""
_EXPORT = re.compile(r"[A-Za-z_]\w*=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella run`."""
    _add_hosts(parser)
    _add_shares(parser)
    add = parser.add_argument
    add("-x", "--setenv", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set environment variables on all ranks; several NAME=VALUE may follow, and it may "
        "be repeated")  # fmt: skip
    add("--log-level", default="WARNING", choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="of the library and of TensorFlow's native code (default: WARNING)")  # fmt: skip
    add("--log-on-all-devices", action="store_true",
        help="with --log-level INFO or DEBUG, show what the library logs on every rank, not only "
        "on rank 0; warnings are always shown")  # fmt: skip
    add("--output-on-all-devices", action="store_true",
        help="show what every rank prints, not only the last one")  # fmt: skip
    add("--trace", metavar="FILE",
        help="record training, for Perfetto and chrome://tracing")  # fmt: skip
    add("--fusion-threshold", metavar="BYTES",
        help="most bytes of gradients that replicas sum at a time, e.g. 32MiB")  # fmt: skip
    add("--timeout", type=positive_seconds, metavar="S", help="kill the job after S seconds")
    add("--dry-run", action="store_true",
        help="print hosts, environment and command, run nothing")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, metavar="[--] script.py ...",
        help="the script and its arguments; or `-- -m module ...`")  # fmt: skip
    parser.set_defaults(parse=parser.parse_args)
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds what says where the ranks run, and who starts them."""
    add = parser.add_argument
    add("-n", "--num-ranks", type=positive_int, metavar="N", help="number of ranks (default: 1)")
    add("--n-per-node", "--devices-per-node", type=positive_int, metavar="K",
        help="most ranks of a host; without -n, as many on each")  # fmt: skip
    add_reach(parser)


def add_reach(parser: argparse.ArgumentParser) -> None:
    """Adds what says on which hosts ranks run, and how they are reached."""
    add = parser.add_argument
    add("--hostfile", metavar="F",
        help="hosts to run on, one per line: `host`, `host:4` or `host slots=4`")  # fmt: skip
    add("--mpi", default="auto", choices=("auto", "mpich", "openmpi", "slurm"),
        help="MPI that starts the ranks (default: the one mpi4py loads)")  # fmt: skip
    add("--remote-shell", metavar="CMD",
        help="what reaches other hosts, e.g. 'ssh -p 2222' (default: ssh)")  # fmt: skip
    add("--mpi-args", metavar="ARGS", help="further options for the MPI's own launcher")
    add("--python-interpreter", metavar="CMD",
        help="what runs the script on each rank (default: this Python)")  # fmt: skip


def _add_shares(parser: argparse.ArgumentParser) -> None:
    """Adds what says which part of its host a rank gets."""
    add = parser.add_argument
    add("--threads", type=positive_int, metavar="K",
        help="threads per rank (default: cores of its host / ranks on it)")  # fmt: skip
    add("--bind", choices=("auto", "none"),
        help="give each rank cores of its own where the ranks' threads fill the node (default), "
        "or none")  # fmt: skip
    add("--pin-to-socket", action="store_true",
        help="give each rank a socket (NUMA node) of its own")  # fmt: skip
    add("--pin-memory-to-socket", action="store_true",
        help="and memory of this socket only")  # fmt: skip
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument("--share-gpus", action="store_true",
        help="let ranks of a host share its GPUs; by default each has one of its own")  # fmt: skip
    gpus.add_argument("--no-gpu", "--no-gpus", action="store_true", help="train on CPUs only")


def with_all_exports(arguments: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments with all variables of `-x A=1 B=2 ...`.

    The parser takes the second one for the script, and leaves all behind it as it is.
    """
    while arguments.exports and arguments.command and _EXPORT.match(arguments.command[0]):
        arguments.exports.append(arguments.command.pop(0))
        following = arguments.command
        if following[:1] not in ([], ["--"]) and following[0].startswith("-"):
            arguments.command = []
            arguments = arguments.parse(following, arguments)
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    pinned = [
        option
        for option in ("--pin-to-socket", "--pin-memory-to-socket")
        if getattr(arguments, option[2:].replace("-", "_"))
    ]
    if pinned and arguments.bind is not None:
        raise ConfigurationError(
            "A rank is bound to a socket, or to its share of all cores. "
            f"Received: {pinned[0]} and --bind={arguments.bind}"
        )
    check_reach(arguments)


def check_reach(arguments: argparse.Namespace) -> None:
    """Refuses commands without a word."""
    for name in ("python_interpreter", "remote_shell"):
        if (value := getattr(arguments, name)) is not None and not value.strip():
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is a command, which starts Python scripts or reaches "
                f"hosts; leave it out for the usual one. Received: {value!r}"
            )
