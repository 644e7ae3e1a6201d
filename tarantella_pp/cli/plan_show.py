"""`tarantella plan show`: the table of a plan."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.io import plan_pictures
from tarantella_pp.cli.io.output import write_table
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.cli.io.plan_files import AnyPlan
    from tarantella_pp.partition.external.external_plan import ExternalPlan
    from tarantella_pp.partition.graph.layer_graph import LayerGraph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan show`."""
    parser.usage = "%(prog)s PLAN [options]"
    parser.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    plan_pictures.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, and draws it where that is asked for."""
    from tarantella_pp.cli.io.plan_files import load_plan

    plan_pictures.check(arguments)
    plan = load_plan(arguments.plan)
    draw(plan, None, arguments)
    show(plan, as_json=arguments.json)
    return 0


def draw(plan: AnyPlan, graph: LayerGraph | None, arguments: argparse.Namespace) -> None:
    """Draws a plan, if that is asked for."""
    if not is_drawn(arguments):
        return
    from tarantella_pp.partition.plan.plan import Plan

    if not isinstance(plan, Plan):
        raise no_pictures()
    for path in plan_pictures.write(plan, graph, arguments):
        if not arguments.json:
            write_table(f"Wrote {path}.")


def is_drawn(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for a picture."""
    return any(getattr(arguments, kind) is not None for kind in ("html", "svg", "png", "dot"))


def no_pictures() -> ConfigurationError:
    """Returns the error that the plan of an external graph has no pictures."""
    return ConfigurationError(
        "The plan of an external graph has no pictures; leave out --html, --svg, --png and --dot."
    )


def show(plan: AnyPlan, *, as_json: bool) -> None:
    """Writes a plan to stdout."""
    if as_json:
        sys.stdout.write(f"{plan.to_json()}\n")
        return
    from tarantella_pp.partition.plan.plan import Plan

    write_table(*([plan] if isinstance(plan, Plan) else _graph_table(plan)))


def _graph_table(plan: ExternalPlan) -> list[Any]:
    """Makes the table of an external graph's plan, in the graph's own units."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    work = "FLOPs" if plan.balance == "flops" else "Time"
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Stage", "Nodes", "Memory", work, "Communication", f"{work} + comm."):
        rows.add_column(name, justify="right")
    for index, stage in enumerate(plan.stages):
        figures = (stage.memory, stage.work, stage.comm, stage.work + stage.comm)
        rows.add_row(str(index), str(stage.nodes), *(f"{value:.6g}" for value in figures))
    title = f"Plan of {plan.graph!r}: {len(plan.assignment)} nodes on {plan.num_stages} stages"
    proof = plan.certificate
    quality = (
        f"Balanced by {plan.balance}: largest stage {proof.value:.6g}, {proof.verdict()} "
        f"({proof.method}, {proof.seconds:.2g} s)."
    )
    cut = f"Cut: {plan.cut_bytes:.6g} bytes, {plan.cut_comm:.6g} of communication."
    units = "Figures are in the units of the graph"
    if plan.units:
        units += ": " + ", ".join(f"{name} in {unit}" for name, unit in plan.units.items())
    units += "."
    return [Text(title, style="bold"), rows, quality, cut, units]
