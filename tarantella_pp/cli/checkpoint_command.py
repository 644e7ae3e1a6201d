"""`tarantella checkpoint`: shows, verifies and converts the checkpoints of a run."""

from __future__ import annotations

import argparse

from tarantella_pp.cli.io.subcommands import Subcommands

COMMANDS = {
    "show": "list checkpoints, and print what is in one",
    "verify": "compare the files of checkpoints with their checksums",
    "convert": "write a file of plain Keras from a checkpoint, or the other way",
}
"""Subcommands and their help; each is a module `checkpoint_NAME` of the room below."""
_SUBCOMMANDS = Subcommands("checkpoint", "tarantella_pp.cli.checkpoint.checkpoint_", COMMANDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella checkpoint` and their options."""
    _SUBCOMMANDS.add_to(parser)
    parser.epilog = "exit codes: 0 done; 1 failed, or a checkpoint is damaged; 2 usage."


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    return _SUBCOMMANDS.run(arguments)
