"""`tarantella plan`: makes, shows, checks and compares plans."""

from __future__ import annotations

import argparse

from tarantella_pp.cli import plan_compare, plan_make
from tarantella_pp.cli.output import add_subcommands, run_subcommand

ADDERS = (
    plan_make.add_make,
    plan_make.add_show,
    plan_make.add_check,
    plan_compare.add_diff,
    plan_compare.add_compare,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    parsers = add_subcommands(
        parser,
        make=(plan_make.make, "plan the stages of a model or of a graph"),
        show=(plan_make.show, "print the table of a plan"),
        check=(plan_make.check, "check that a plan belongs to a model"),
        diff=(plan_compare.run_diff, "say what two plans do differently"),
        compare=(
            plan_compare.run_compare,
            "compare with the rules by which other libraries cut",
        ),
    )
    for add, subcommand in zip(ADDERS, parsers, strict=True):
        add(subcommand)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    return run_subcommand("plan", arguments)
