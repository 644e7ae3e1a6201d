"""`tarantella plan show`: the table of a plan."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tarantella_pp.cli.io.output import write_table
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.layer_graph import LayerGraph
    from tarantella_pp.partition.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan show`."""
    parser.usage = "%(prog)s PLAN [options]"
    parser.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    add_page(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, and draws it where that is asked for."""
    from tarantella_pp.cli.io.plan_files import load_plan

    check_page(arguments)
    plan = load_plan(arguments.plan)
    write_page(plan, None, arguments)
    show(plan, as_json=arguments.json)
    return 0


def add_page(parser: argparse.ArgumentParser) -> None:
    """Adds the option that writes a plan's page."""
    parser.add_argument("--html", nargs="?", const="", metavar="FILE",
        help="write a page with stages, memory, timeline and layer graph, which needs no network: "
        "into a file or a folder (default: here, named after the model)")  # fmt: skip


def check_page(arguments: argparse.Namespace) -> None:
    """Checks, before the work is done, that a page can be written."""
    given = arguments.html
    if not given:
        return
    is_folder = given.endswith("/") or Path(given).is_dir()
    if not is_folder and Path(given).suffix.lower() != ".html":
        raise ConfigurationError(
            f"Expected a file that ends in .html, or a folder. Received: --html={given}"
        )
    folder = Path(given) if is_folder else Path(given).parent
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder '{folder}'. Received: --html={given}")


def write_page(plan: Plan, graph: LayerGraph | None, arguments: argparse.Namespace) -> None:
    """Writes the page of a plan, if one is asked for."""
    if arguments.html is None:
        return
    from tarantella_pp.partition.plan.page import drawn_step, render_html

    path = Path(arguments.html)
    if not arguments.html or path.is_dir():
        name = re.sub(r"[^\w.-]+", "_", plan.model).strip("._")[:80] or "plan"
        path /= f"{name}.html"
    try:
        path.write_text(render_html(plan, graph, drawn_step(plan)), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write '{path}': {error.strerror}. Name a file that can be written."
        ) from error
    if not arguments.json:
        write_table(f"Wrote {path}.")


def show(plan: Plan, *, as_json: bool) -> None:
    """Writes a plan to stdout."""
    if as_json:
        sys.stdout.write(f"{plan.to_json()}\n")
        return
    write_table(plan)
