"""`tarantella plan diff`: what two plans do differently."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.io.output import write_json, write_table

if TYPE_CHECKING:
    from tarantella_pp.partition.plan.difference import Difference

_MOST_LINES = 40
"""More moves or names than this are counted, not listed; --json has them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan diff`."""
    parser.add_argument("before", metavar="BEFORE", help="JSON file of the first plan")
    parser.add_argument("after", metavar="AFTER", help="JSON file of the second plan")


def run(arguments: argparse.Namespace) -> int:
    """Prints the difference; plans that differ are no failure."""
    from tarantella_pp.cli.io.plan_files import load_plan
    from tarantella_pp.partition.plan.difference import difference
    from tarantella_pp.partition.plan.plan_config import PlanConfig

    before, after = load_plan(arguments.before), load_plan(arguments.after)
    options = ("model", *PlanConfig.__struct_fields__, "optimizer", "schedule_text")
    changes = difference(before, after, options, ("memory_bytes", "flops"))
    if arguments.json:
        write_json(changes.to_dict())
    else:
        _print(changes)
    return 0


def _print(changes: Difference) -> None:
    if changes.same:
        write_table("The plans are the same.")
        return
    lines = [f"{name}: {_shown(a)} -> {_shown(b)}" for name, (a, b) in changes.options.items()]
    for text, names in (
        ("only in the first", changes.removed),
        ("only in the second", changes.added),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            lines.append(f"{len(names)} nodes {text}: {', '.join(names[:5])}{more}")
    moved = sum(move.nodes for move in changes.moves)
    lines.append(f"{moved} nodes on another stage{':' if moved else '.'}")
    for move in changes.moves[:_MOST_LINES]:
        layers = move.first if move.nodes == 1 else f"{move.first} .. {move.last} ({move.nodes})"
        lines.append(f"  {move.before} -> {move.after}  {layers}")
    if len(changes.moves) > _MOST_LINES:
        lines.append(f"  and {len(changes.moves) - _MOST_LINES} more such moves")
    write_table(*lines, _stage_table(changes))


def _shown(value: Any) -> Any:
    """Returns what a value is shown as; a schedule as its beginning."""
    text = str(value)
    return f"{text[:40]} ..." if len(text) > 80 or "\n" in text else value


def _stage_table(changes: Difference) -> Any:
    """Makes the table of what stages cost: before, after and the change."""
    from rich import box
    from rich.table import Table

    from tarantella_pp.partition.graph.units import format_bytes

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("Stage", justify="right")
    rows.add_column("")
    for name in ("Before", "After", "Change"):
        rows.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(changes.stages):
        for place, (name, values) in enumerate(stage.items()):
            title = "FLOPs" if name == "flops" else name.removesuffix("_bytes")
            as_bytes = name == "memory_bytes"
            shown = [
                "-" if v is None else format_bytes(v) if as_bytes else f"{v:.6g}" for v in values
            ]
            rows.add_row("" if place else str(index), title, *shown, _change(*values))
    return rows


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if before == after:
        return "="
    return f"{100 * (after / before - 1):+.1f} %" if before else "new"
