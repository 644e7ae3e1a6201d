"""`tarantella plan compare`: our plan beside those of other libraries' rules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli import plan_make
from tarantella_pp.cli.io import model_source
from tarantella_pp.cli.io.output import write_json, write_table
from tarantella_pp.cli.io.quantities import positive_int
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.baselines import Comparison

DESCRIPTION = """\
Prices four plans by their largest stage: ours; equal numbers of layers; parameter balance, as
DeepSpeed's partition_method="parameters"; block partition, as torchgpipe balances. The other rules
cut the order of the graph; ours chooses among all orders. With --balance also the stages that it
gives."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan compare`."""
    parser.usage = "%(prog)s MODEL --stages S [options]"
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("model", metavar="MODEL", help=model_source.HELP)
    add("--stages", dest="num_stages", type=positive_int, metavar="S",
        help="number of pipeline stages (default: those of --balance)")  # fmt: skip
    add("--balance", metavar="N,N,...",
        help="a number of layers for each stage, to be priced, too, e.g. 526,551")  # fmt: skip
    plan_make.add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison."""
    arguments.balance = _given(arguments)
    name, comparisons = _of_model(arguments)
    if arguments.json:
        objectives = {comparison.objective: comparison.to_dict() for comparison in comparisons}
        write_json({"model": name, "num_stages": arguments.num_stages, "objectives": objectives})
    else:
        write_table(*_tables(name, arguments.num_stages, comparisons))
    return 0


def _given(arguments: argparse.Namespace) -> list[int] | None:
    """Reads the stages that are given, and sets their number."""
    given = plan_make.given_balance(arguments.balance)
    if given is None and arguments.balance is not None:
        raise ConfigurationError(
            f"Expected numbers of layers such as 526,551. Received: --balance={arguments.balance}"
        )
    stages = arguments.num_stages or (given and len(given))
    if stages is None:
        raise ConfigurationError("Expected --stages or --balance. Received: neither")
    if given is not None and len(given) != stages:
        raise ConfigurationError(
            f"Expected a number of layers for each of {stages} stages. "
            f"Received: --balance={arguments.balance}"
        )
    arguments.num_stages = stages
    return given


def _of_model(arguments: argparse.Namespace) -> tuple[str, list[Comparison]]:
    """Compares memory, and FLOPs."""
    model = model_source.build_without_weights(arguments.model)
    import numpy as np

    from tarantella_pp.models.make_plan import default_machine
    from tarantella_pp.partition.baselines import by_rules, compare
    from tarantella_pp.partition.best_stages import sums_of
    from tarantella_pp.partition.given_balance import assignment_of
    from tarantella_pp.partition.options import PlanOptions
    from tarantella_pp.partition.plan.hardware_spec import machine_of
    from tarantella_pp.partition.planner import Planner
    from tarantella_pp.partition.stage_memory import state_sums

    chosen = plan_make.model_options(arguments)
    optimizer = chosen.pop("optimizer", None) or model_source.optimizer_of(arguments.model, model)
    machine = machine_of(chosen.pop("machine")) if "machine" in chosen else default_machine()
    planner = Planner.of(model, optimizer, machine=machine)
    graph = planner.graph
    given = None if arguments.balance is None else assignment_of(graph, arguments.balance)
    if arguments.num_stages > len(graph.nodes):
        raise ConfigurationError(
            f"{arguments.model} has {len(graph.nodes)} operations. "
            f"Received: --stages={arguments.num_stages}"
        )
    comparisons = []
    for balance in ("memory", "flops"):
        asked = PlanOptions(num_stages=arguments.num_stages, balance=balance, **chosen)
        options = asked.settled()
        costs = planner.costs(options)

        def value(assignment: Sequence[int], costs: Any = costs, options: Any = options) -> float:
            if options.balance == "flops":
                return float(np.bincount(assignment, costs.flops()).max())
            stages = costs.stages(assignment, options.in_flight, options.repeats)
            return float(max(stage.memory_bytes for stage in stages))

        others = by_rules(planner.blocks, sums_of(costs, options), state_sums(costs))
        if given is not None:
            others["given"] = given
        comparisons.append(compare(balance, planner.solve(options), value, others))
    return planner.model, comparisons


def _tables(name: str, num_stages: int, comparisons: Sequence[Comparison]) -> list[Any]:
    """Makes the table: a row for each rule, a value and a ratio for each objective."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("Rule")
    for comparison in comparisons:
        rows.add_column(_title(comparison), justify="right", no_wrap=True)
        rows.add_column("/ ours", justify="right", no_wrap=True)
    for rule in comparisons[0].values:
        cells = []
        for comparison in comparisons:
            ratio = comparison.ratio(rule)
            cells += [f"{comparison.values[rule]:.6g}", "-" if ratio is None else f"{ratio:.3f}"]
        rows.add_row(rule, *cells)
    title = f"Largest stage of '{name}' on {num_stages} stages"
    return [Text(title, style="bold"), rows, *(Text(_proof(one)) for one in comparisons)]


def _proof(comparison: Comparison) -> str:
    """Says how good our plan is known to be."""
    certificate = comparison.certificate
    if certificate.optimal:
        known = "optimal"
    elif certificate.gap is None:
        known = "without a lower bound"
    else:
        known = f"at most {100 * certificate.gap:.2g} % above the optimum"
    return f"{_title(comparison)}: ours is {known} ({certificate.method})."


def _title(comparison: Comparison) -> str:
    objective = comparison.objective
    return "FLOPs" if objective == "flops" else objective.capitalize()
