"""The command `tarantella`: finds the subcommand and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tarantella_pp.cli.output import FAILURE, USAGE_ERROR, Parser
from tarantella_pp.errors import ConfigurationError, TarantellaError

# Subcommands and their help. Each is a module of this package, `NAME_command`, with
# `add_arguments(parser)` and `run(arguments) -> exit code`.
COMMANDS = {
    "run": "start a script on several ranks (the default)",
    "plan": "make, show and compare plans",
    "simulate": "step time, bubble and memory of a schedule",
    "checkpoint": "show, verify and convert the checkpoints of a run",
    "doctor": "check versions, MPI, cores and links, of this host or of all in a hostfile",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    explicit = bool(arguments) and arguments[0] in COMMANDS
    name = arguments.pop(0) if explicit else "run"
    # Only the module of this command: others load what takes seconds.
    module = importlib.import_module(f"tarantella_pp.cli.{name}_command")
    parser = _parser(name if explicit else "")
    module.add_arguments(parser)
    if not explicit and not arguments:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        return int(module.run(parser.parse_args(arguments)))
    except TarantellaError as error:
        sys.stderr.write(f"tarantella: {error}\n")
        return USAGE_ERROR if isinstance(error, ConfigurationError) else FAILURE
    except KeyboardInterrupt:
        return 130


def _parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a subcommand; the empty name is `tarantella` without one."""
    if name:
        return Parser(f"tarantella {name}", description=COMMANDS[name], allow_abbrev=False)
    lines = "\n".join(f"  {key:10s} {text}" for key, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "tarantella",
        usage="tarantella [options] [--] script.py ...\n       tarantella COMMAND [options]",
        description="Trains Keras models in a pipeline over MPI ranks.\n\n"
        f"commands (`tarantella COMMAND --help` explains each):\n{lines}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and leave")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all else here."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from tarantella_pp.dependencies import version_of

        sys.stdout.write(f"tarantella-pp {version_of('tarantella-pp') or '(not installed)'}\n")
        parser.exit(0)


if __name__ == "__main__":
    sys.exit(main())
