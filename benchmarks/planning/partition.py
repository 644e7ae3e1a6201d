"""The partitioner against the rules of other libraries.

    python benchmarks/planning/partition.py [GRAPH.json | DIRECTORY ...] [--stages 2 4 8]
        [--objectives memory time load] [--time-budget 30] [--large]

Without graphs, some are made here; with `--large`, the operators of a GPT, 50,000 of them. Two
tables: what each rule reaches over our value (1.000 is ours; where ours is not proven optimal, over
our lower bound), and how good and how quick our plans are.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tarantella_pp.partition.baselines import RULES
from tarantella_pp.partition.external.external_graph import (
    ExternalGraph,
    load_graph,
    to_problem,
)
from tarantella_pp.partition.solvers.problem.certificate import Certificate
from tarantella_pp.partition.solvers.problem.problem import Problem
from tarantella_pp.partition.solvers.solve import solve
from tests.zoo.graphs import branching, gpt, layered, residual


@dataclass(frozen=True)
class Row:
    """One graph, objective and number of stages."""

    graph: str
    nodes: int
    objective: str
    stages: int
    certificate: Certificate
    seconds: float
    ratios: dict[str, float]


def graphs(paths: list[Path], *, large: bool) -> Iterable[ExternalGraph]:
    """Yields the graphs of files and directories, or some made here."""
    if large:
        yield gpt(50_000)
    elif not paths:
        yield from (gpt(500), gpt(5000), residual(), branching(), layered())
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            if path.is_dir() and '"nodes"' not in file.read_text(encoding="utf-8"):
                continue
            yield load_graph(file)


def ratio(problem: Problem, rule: str, bound: float) -> float:
    """Returns a rule's value over the optimum, or over what is known of it."""
    value = problem.evaluate(RULES[rule](problem)).value
    return value / bound if bound > 0 else 1.0


def measure(graph: ExternalGraph, objective: str, stages: int, budget: float) -> Row:
    """Solves one problem and prices the rules on it."""
    problem = to_problem(graph, stages, objective)
    begun = time.process_time()
    certificate = solve(problem, time_budget=budget).certificate
    seconds = time.process_time() - begun
    bound = certificate.value if certificate.optimal else certificate.lower_bound
    ratios = {rule: ratio(problem, rule, bound) for rule in RULES}
    ratios["ours"] = certificate.value / bound if bound > 0 else 1.0
    return Row(graph.name, len(graph.nodes), objective, stages, certificate, seconds, ratios)


def summary(rows: list[Row]) -> Table:
    """Returns geometric mean and worst of value over optimum, by rule and objective."""
    objectives = sorted({row.objective for row in rows})
    table = Table("rule", *(f"{name}: mean (worst)" for name in objectives), title="over optimum")
    for rule in ["ours", *RULES]:
        cells = []
        for objective in objectives:
            ratios = [row.ratios[rule] for row in rows if row.objective == objective]
            mean = math.exp(sum(math.log(value) for value in ratios) / len(ratios))
            cells.append(f"{mean:.4f} ({max(ratios):.3f})")
        table.add_row(rule, *cells)
    return table


def certificates(rows: list[Row]) -> Table:
    """Returns value, bound and time of each of our plans."""
    table = Table("graph", "nodes", "objective", "stages", "value", "gap", "CPU s", "method")
    for row in rows:
        found = row.certificate
        gap = "optimal" if found.optimal else f"{100 * (found.gap or 0.0):.3g} %"
        value = f"{row.certificate.value:.6g}"
        cells = (row.graph, row.nodes, row.objective, row.stages, value, gap)
        table.add_row(*map(str, cells), f"{row.seconds:.2f}", row.certificate.method)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="The partitioner against other libraries' rules.")
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--objectives", nargs="+", default=["memory", "time", "load"])
    parser.add_argument("--time-budget", type=float, default=30.0)
    parser.add_argument("--large", action="store_true", help="a graph of 50,000 nodes")
    options = parser.parse_args()
    rows = [
        measure(graph, objective, stages, options.time_budget)
        for graph in graphs(options.graphs, large=options.large)
        for objective in options.objectives
        for stages in options.stages
    ]
    console = Console(width=None if Console().is_terminal else 140)
    console.print(certificates(rows))
    console.print(summary(rows))


if __name__ == "__main__":
    main()
