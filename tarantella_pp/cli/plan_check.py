"""`tarantella plan check`: whether a plan belongs to a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tarantella_pp.cli.io import model_source
from tarantella_pp.cli.io.output import (
    FAILURE,
    one_line,
    write_json,
    write_table,
)
from tarantella_pp.errors import PlanError

if TYPE_CHECKING:
    from tarantella_pp.partition.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan check`."""
    parser.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    parser.add_argument("model", metavar="MODEL", help=model_source.HELP)


def run(arguments: argparse.Namespace) -> int:
    """Says whether the plan fits; returns 1 if it does not."""
    from tarantella_pp.cli.io.plan_files import load_plan

    plan = load_plan(arguments.plan)
    try:
        _check(plan, arguments.model)
    except PlanError as error:
        if not arguments.json:
            raise
        write_json({"fits": False, "difference": one_line(error)})
        return FAILURE
    if arguments.json:
        write_json({"fits": True, "difference": None})
    else:
        write_table(
            f"{arguments.plan} is a plan of {arguments.model}: {len(plan.assignment)} nodes on "
            f"{plan.num_stages} stages."
        )
    return 0


def _check(plan: Plan, source: str) -> None:
    """Checks a plan against a MODEL."""
    model = model_source.build_without_weights(source)
    if model_source.is_graph(source):
        plan.check(model.graph)
        return
    from tarantella_pp.partition.extraction.keras_reader import extract

    plan.check(extract(model).graph)
