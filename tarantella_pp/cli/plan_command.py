"""`tarantella plan`: makes, shows, checks and compares plans."""

from __future__ import annotations

import argparse
import importlib
import sys

from tarantella_pp.cli.io.output import (
    USAGE_ERROR,
    Parser,
    guarded,
)

COMMANDS = {
    "make": "plan the stages of a model or of an external graph",
    "show": "print the table of a plan",
    "check": "check that a plan belongs to a model",
    "diff": "say what two plans do differently",
    "compare": "compare with the rules by which other libraries cut",
}
"""Subcommands and their help; each is a module `plan_NAME` of this package."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    chosen = parser.add_subparsers(dest="plan_command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        subcommand = chosen.add_parser(name, help=text, description=text.capitalize() + ".")
        importlib.import_module(f"tarantella_pp.cli.plan_{name}").add_arguments(subcommand)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    name = arguments.plan_command
    if name is None:
        sys.stderr.write(f"tarantella plan: name one of {', '.join(COMMANDS)}.\n")
        return USAGE_ERROR
    module = importlib.import_module(f"tarantella_pp.cli.plan_{name}")
    return guarded("tarantella plan", lambda: int(module.run(arguments)))
