"""The options of `tarantella plan` that draw a plan: `--html`, `--svg`, `--png` and `--dot`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tarantella_pp.errors import ConfigurationError, ScheduleError

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.layer_graph import LayerGraph
    from tarantella_pp.partition.plan.plan import Plan
    from tarantella_pp.partition.visualization import StepBars

_HELP = {
    "html": "write a page with stages, memory, timeline and layer graph; it needs no network",
    "svg": "draw timeline, memory and layer graph; a folder gets one file for each",
    "png": "the same with matplotlib",
    "dot": "write the layer graph for Graphviz",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    group = parser.add_argument_group(
        "pictures", "each takes a file or a folder; by default the file is named after the model"
    )
    for kind, text in _HELP.items():
        group.add_argument(f"--{kind}", nargs="?", const="", metavar="FILE", help=text)


def check(arguments: argparse.Namespace) -> None:
    """Checks the options, before the work is done."""
    for kind in _HELP:
        given = getattr(arguments, kind)
        if given is None:
            continue
        if given and not _is_folder(given) and Path(given).suffix.lower() != f".{kind}":
            raise ConfigurationError(
                f"Expected a file that ends in .{kind}, or a folder. Received: --{kind}={given}"
            )
        folder = Path(given) if _is_folder(given) else Path(given).parent
        if not folder.is_dir():
            raise ConfigurationError(f"There is no folder '{folder}'. Received: --{kind}={given}")


def write(plan: Plan, graph: LayerGraph | None, arguments: argparse.Namespace) -> list[Path]:
    """Draws what the options ask for."""
    check(arguments)
    timeline = _timeline(plan, arguments)
    written = []
    try:
        for kind in _HELP:
            if getattr(arguments, kind) is not None:
                targets = _targets(kind, getattr(arguments, kind), plan, timeline)
                for path, shown in targets:
                    _draw(kind, shown, path, plan, graph, timeline)
                    written.append(path)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write '{error.filename}': {error.strerror}. Name a file that can be written."
        ) from error
    return written


def _draw(
    kind: str,
    shown: str,
    path: Path,
    plan: Plan,
    graph: LayerGraph | None,
    timeline: StepBars | None,
) -> None:
    """Writes one file."""
    from tarantella_pp.partition import visualization

    if kind == "png":
        visualization.save_png(path, plan, shown, graph=graph, timeline=timeline)
    elif kind == "svg":
        text = visualization.render_svg(plan, shown, graph=graph, timeline=timeline)
        path.write_text(text, encoding="utf-8")
    elif kind == "html":
        path.write_text(visualization.render_html(plan, graph, timeline), encoding="utf-8")
    else:
        path.write_text(visualization.render_dot(plan, graph), encoding="utf-8")


def _targets(
    kind: str, given: str, plan: Plan, timeline: StepBars | None
) -> Iterator[tuple[Path, str]]:
    """The files of an option, and what each shows."""
    stem = re.sub(r"[^\w.-]+", "_", plan.model).strip("._")[:80] or "plan"
    drawn = kind in ("svg", "png")
    if drawn and given and _is_folder(given):
        for picture in ("memory", *(["timeline"] if timeline else []), "graph"):
            yield Path(given) / f"{stem}-{picture}.{kind}", picture
    else:
        named = given and not _is_folder(given)
        path = Path(given) if named else Path(given or ".") / f"{stem}.{kind}"
        yield path, "sheet" if timeline else "memory"


def _timeline(plan: Plan, arguments: argparse.Namespace) -> StepBars | None:
    """The step of the plan; `None` if no picture shows it or its schedule is not one of ours."""
    from tarantella_pp.partition.visualization.step_rows import simulated_step

    if all(getattr(arguments, kind) is None for kind in ("html", "svg", "png")):
        return None
    try:
        return simulated_step(plan)
    except ScheduleError:
        return None


def _is_folder(given: str) -> bool:
    return given.endswith("/") or Path(given).is_dir() if given else False
