"""`tarantella plan`: makes, shows, checks and compares plans."""

from __future__ import annotations

import argparse

from tarantella_pp.cli.io.subcommands import Subcommands

COMMANDS = {
    "make": "plan the stages of a model or of an external graph",
    "show": "print the table of a plan",
    "check": "check that a plan belongs to a model",
    "diff": "say what two plans do differently",
    "compare": "compare with the rules by which other libraries cut",
}
"""Subcommands and their help; each is a module `plan_NAME` of this package."""
_SUBCOMMANDS = Subcommands("plan", "tarantella_pp.cli.plan_", COMMANDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    for subcommand in _SUBCOMMANDS.add_to(parser):
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    return _SUBCOMMANDS.run(arguments)
