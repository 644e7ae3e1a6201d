"""`tarantella plan`: makes, shows, checks and compares plans."""

from __future__ import annotations

import argparse

from tarantella_pp.cli import plan_check, plan_compare, plan_diff, plan_make, plan_show
from tarantella_pp.cli.io.output import add_subcommands, run_subcommand

COMMANDS = {
    "make": (plan_make, "plan the stages of a model or of a graph"),
    "show": (plan_show, "print the table of a plan"),
    "check": (plan_check, "check that a plan belongs to a model"),
    "diff": (plan_diff, "say what two plans do differently"),
    "compare": (plan_compare, "compare with the rules by which other libraries cut"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    commands = {name: (module.run, text) for name, (module, text) in COMMANDS.items()}
    parsers = add_subcommands(parser, **commands)
    for (module, _), subcommand in zip(COMMANDS.values(), parsers, strict=True):
        module.add_arguments(subcommand)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    return run_subcommand("plan", arguments)
