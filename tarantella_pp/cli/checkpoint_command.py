"""`tarantella checkpoint`: shows, verifies and converts the checkpoints of a run."""

from __future__ import annotations

import argparse
import importlib
import sys

from tarantella_pp.cli.io.output import USAGE_ERROR, Parser, guarded

COMMANDS = {
    "show": "list checkpoints, and print what is in one",
    "verify": "compare the files of checkpoints with their checksums",
    "convert": "write a file of plain Keras from a checkpoint",
}
"""Subcommands and their help; each is a module `checkpoint_NAME` of the room below."""
_ROOM = "tarantella_pp.cli.checkpoint.checkpoint_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella checkpoint` and their options."""
    chosen = parser.add_subparsers(
        dest="checkpoint_command", metavar="COMMAND", parser_class=Parser
    )
    for name, text in COMMANDS.items():
        subcommand = chosen.add_parser(name, help=text, description=text.capitalize() + ".")
        importlib.import_module(f"{_ROOM}{name}").add_arguments(subcommand)
    parser.epilog = "exit codes: 0 done; 1 failed, or a checkpoint is damaged; 2 usage."


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    name = arguments.checkpoint_command
    if name is None:
        sys.stderr.write(f"tarantella checkpoint: name one of {', '.join(COMMANDS)}.\n")
        return USAGE_ERROR
    module = importlib.import_module(f"{_ROOM}{name}")
    return guarded("tarantella checkpoint", lambda: int(module.run(arguments)))
