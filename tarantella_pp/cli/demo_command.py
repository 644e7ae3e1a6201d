"""`tarantella demo`: trains the network of `tarantella_pp.demo` on handwritten digits."""

from __future__ import annotations

import argparse

from tarantella_pp.cli import run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella run`, and takes two ranks where it takes one."""
    run_command.add_arguments(parser)
    parser.set_defaults(run=run, num_ranks=2)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code of the job."""
    own = run_command.without_dashes(arguments.command)
    arguments.command = ["-m", "tarantella_pp.demo", *own]
    return run_command.run(arguments)
