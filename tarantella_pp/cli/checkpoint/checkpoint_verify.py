"""`tarantella checkpoint verify`: whether checkpoints are what was written."""

from __future__ import annotations

import argparse

from tarantella_pp.cli.checkpoint import checkpoint_paths
from tarantella_pp.cli.io.output import FAILURE, write_json, write_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella checkpoint verify`."""
    parser.add_argument("directory", metavar="DIRECTORY", help=checkpoint_paths.HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Looks at every file; returns 1 if one is damaged or missing."""
    from tarantella_pp.checkpoints.verification import all_damage

    found = {path.name: all_damage(path) for path in checkpoint_paths.found_in(arguments.directory)}
    if arguments.json:
        write_json(found)
    else:
        for name, problems in found.items():
            write_table(*([f"{name}: damaged: {text}" for text in problems] or [f"{name}: whole"]))
    return FAILURE if any(found.values()) else 0
