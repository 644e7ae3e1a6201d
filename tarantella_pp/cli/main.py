"""The command `tarantella`: finds the subcommand and runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from tarantella_pp.cli.output import FAILURE, USAGE_ERROR, Parser, one_line
from tarantella_pp.errors import ConfigurationError, GraphError, ScheduleError, TarantellaError

# Subcommands and their help. Each is a module of this package, `NAME_command`, whose
# `add_arguments(parser)` says what is called with the arguments and returns the exit code.
COMMANDS = {
    "run": "start a script on several ranks (the default)",
    "plan": "make and show plans",
    "simulate": "step time, bubble and memory of a schedule",
    "checkpoint": "show, verify and convert the checkpoints of a run",
    "demo": "train a small network on handwritten digits, on two ranks",
    "doctor": "check versions, MPI, cores and links of this host or of all in a hostfile",
}
# As a shell says that SIGPIPE ended a command.
BROKEN_PIPE = 141
# What options and files that make no sense raise; everything else is a failure.
WRONG_INPUT = (ConfigurationError, GraphError, ScheduleError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; errors are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # None where they are closed: then the next file to be opened would be it, for MPI, too.
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    explicit = bool(arguments) and arguments[0] in COMMANDS
    name = arguments.pop(0) if explicit else "run"
    # Only the module of this command: others load what takes seconds.
    module = importlib.import_module(f"tarantella_pp.cli.{name}_command")
    parser = _whole_parser()
    if explicit:
        parser = Parser(f"tarantella {name}", description=COMMANDS[name], allow_abbrev=False)
    module.add_arguments(parser)
    if not explicit and not arguments:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        if arguments == ["--version"] and not explicit:  # looking it up takes longer than all else
            from tarantella_pp.errors import version_of

            sys.stdout.write(f"tarantella-pp {version_of('tarantella-pp') or '(not installed)'}\n")
            return 0
        parsed = parser.parse_args(arguments)
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except TarantellaError as error:
        sys.stderr.write(f"{parser.prog}: {one_line(error)}\n")
        return USAGE_ERROR if isinstance(error, WRONG_INPUT) else FAILURE
    except (OSError, UnicodeError) as error:
        # What is left would fail again at exit, e.g. where the reader is gone as behind `| head`.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        sys.stderr.write(f"{parser.prog}: {one_line(error)}\n")
        return FAILURE
    except KeyboardInterrupt:
        return 130
    return code


def _whole_parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {key:10s} {text}" for key, text in COMMANDS.items())
    parser = Parser(
        "tarantella",
        usage="tarantella [options] [--] script.py ...\n       tarantella COMMAND [options]",
        description="Trains Keras models in a pipeline over MPI ranks.\n\n"
        f"commands (`tarantella COMMAND --help` explains each):\n{lines}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    return parser


if __name__ == "__main__":
    sys.exit(main())
