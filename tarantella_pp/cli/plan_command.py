"""`tarantella plan`: makes, shows, checks and compares plans; `compare` and `diff` are here."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli import inputs, plan_make
from tarantella_pp.cli.inputs import positive_int
from tarantella_pp.cli.output import (
    add_subcommands,
    run_subcommand,
    table,
    write_json,
    write_table,
)
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.baselines import Comparison
    from tarantella_pp.partition.plan.plan import Plan

DESCRIPTION = """\
Prices four plans by their largest stage: ours; equal numbers of layers; parameter balance, as
DeepSpeed's partition_method="parameters"; block partition, as torchgpipe balances. The other rules
cut the order of the graph; ours chooses among all orders. With --balance also the stages that it
gives."""
# What stages cost, and what `plan diff` calls it.
_FIGURES = {"memory_bytes": "memory", "flops": "FLOPs"}
# More moves than this are counted, not listed; --json has them all.
_MOST_LINES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    parsers = add_subcommands(
        parser,
        make=(plan_make.make, "plan the stages of a model or of a graph"),
        show=(plan_make.show, "print the table of a plan"),
        check=(plan_make.check, "check that a plan belongs to a model"),
        diff=(run_diff, "say what two plans do differently"),
        compare=(
            run_compare,
            "compare with the rules by which other libraries cut",
        ),
    )
    adders = (plan_make.add_make, plan_make.add_show, plan_make.add_check, add_diff, add_compare)
    for add, subcommand in zip(adders, parsers, strict=True):
        add(subcommand)
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit code."""
    return run_subcommand("plan", arguments)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan compare`."""
    parser.usage = "%(prog)s MODEL --stages S [options]"
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("model", metavar="MODEL", help=inputs.HELP)
    add("--stages", dest="num_stages", type=positive_int, metavar="S",
        help="number of pipeline stages (default: as many as --balance has)")  # fmt: skip
    add("--balance", metavar="N,N,...",
        help="a number of layers for each stage, to be priced, too, e.g. 526,551")  # fmt: skip
    plan_make.add_model_options(parser)


def run_compare(arguments: argparse.Namespace) -> int:
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
    model = inputs.build_without_weights(arguments.model)
    import numpy as np

    with inputs.quiet_keras("A comparison"):
        from tarantella_pp.models.make_plan import default_machine
    from tarantella_pp.partition.baselines import by_rules, compare
    from tarantella_pp.partition.best_stages import state_sums, sums_of
    from tarantella_pp.partition.options import PlanOptions, assignment_of
    from tarantella_pp.partition.plan.hardware_spec import machine_of
    from tarantella_pp.partition.planner import Planner

    chosen = plan_make.model_options(arguments)
    optimizer = chosen.pop("optimizer", None) or inputs.optimizer_of(arguments.model, model)
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
    from rich.text import Text

    rows = []
    for rule in comparisons[0].values:
        cells = [rule]
        for comparison in comparisons:
            ratio = comparison.ratio(rule)
            cells += [f"{comparison.values[rule]:.6g}", "-" if ratio is None else f"{ratio:.3f}"]
        rows.append(cells)
    heads = [head for comparison in comparisons for head in (_title(comparison), "/ ours")]
    title = Text(f"Largest stage of '{name}' on {num_stages} stages", style="bold")
    shown = table(["Rule", *heads], rows, left=("Rule",))
    return [title, shown, *(Text(_proof(one)) for one in comparisons)]


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


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan diff`."""
    parser.add_argument("before", metavar="BEFORE", help="JSON file of the first plan")
    parser.add_argument("after", metavar="AFTER", help="JSON file of the second plan")


def run_diff(arguments: argparse.Namespace) -> int:
    """Prints the difference; plans that differ are no failure."""
    changes = _difference(inputs.load_plan(arguments.before), inputs.load_plan(arguments.after))
    if arguments.json:
        write_json(changes)
    elif changes["same"]:
        write_table("The plans are the same.")
    else:
        write_table(*_lines(changes), _stage_table(changes["stages"]))
    return 0


def _difference(before: Plan, after: Plan) -> dict[str, Any]:
    """Returns options, nodes and stages that differ, ready for JSON."""
    # Nodes are known by their names, the first, second ... of a name each; names that Keras has
    # numbered anew by their places, where both plans are of the same model.
    from tarantella_pp.partition.plan.plan_parts import PlanConfig

    old, new = _names(before), _names(after)
    if before.fingerprint == after.fingerprint:
        new = old
    names = ("model", *PlanConfig.__struct_fields__, "optimizer", "schedule_text")
    both = {name: (getattr(before, name), getattr(after, name)) for name in names}
    here, there = set(old), dict(zip(new, after.assignment, strict=True))
    stages = [
        {name: (getattr(a, name, None), getattr(b, name, None)) for name in _FIGURES}
        for a, b in itertools.zip_longest(before.stages, after.stages)
    ]
    changes = {
        "options": {name: pair for name, pair in both.items() if pair[0] != pair[1]},
        "removed": [name for name in old if name not in there],
        "added": [name for name in new if name not in here],
        "moves": list(_moves(old, before.assignment, there)),
    }
    alike = all(a == b for stage in stages for a, b in stage.values())
    return {"same": alike and not any(changes.values()), **changes, "stages": stages}


def _names(plan: Plan) -> list[str]:
    """Returns a name of its own for each node."""
    seen: Counter[str] = Counter()
    names = []
    for name in plan.node_names:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def _moves(
    names: Sequence[str], stages: Sequence[int], there: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields runs of nodes that go from one stage to the same other one."""
    pairs = zip(names, stages, strict=True)
    common = [(name, before, there[name]) for name, before in pairs if name in there]
    for (before, after), run in itertools.groupby(common, lambda found: found[1:]):
        nodes = [name for name, _, _ in run]
        if before != after:
            ends = {"first": nodes[0], "last": nodes[-1], "nodes": len(nodes)}
            yield {**ends, "before": before, "after": after}


def _lines(changes: dict[str, Any]) -> Iterator[str]:
    """Says what differs but for the figures of stages."""
    for name, (before, after) in changes["options"].items():
        yield f"{name}: {_shown(before)} -> {_shown(after)}"
    for place, names in (("first", changes["removed"]), ("second", changes["added"])):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{len(names)} nodes only in the {place}: {', '.join(names[:5])}{more}"
    moves = changes["moves"]
    moved = sum(move["nodes"] for move in moves)
    yield f"{moved} nodes on another stage{':' if moved else '.'}"
    for move in moves[:_MOST_LINES]:
        several = "" if move["nodes"] == 1 else f" .. {move['last']} ({move['nodes']})"
        yield f"  {move['before']} -> {move['after']}  {move['first']}{several}"
    if len(moves) > _MOST_LINES:
        yield f"  and {len(moves) - _MOST_LINES} more such moves"


def _shown(value: Any) -> Any:
    """Returns what a value is shown as; a schedule as its beginning."""
    text = str(value)
    return f"{text[:40]} ..." if len(text) > 80 or "\n" in text else value


def _stage_table(stages: Sequence[dict[str, Any]]) -> Any:
    """Makes the table of what stages cost: before, after and the change."""
    from tarantella_pp.partition.graph.units import format_bytes

    rows = []
    for index, stage in enumerate(stages):
        for name, title in _FIGURES.items():
            write = format_bytes if name == "memory_bytes" else "{:.6g}".format
            shown = ["-" if value is None else write(value) for value in stage[name]]
            first = "" if name == "flops" else str(index)
            rows.append((first, title, *shown, _change(*stage[name])))
    return table(("Stage", "", "Before", "After", "Change"), rows, left=("",))


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if before == after:
        return "="
    return f"{100 * (after / before - 1):+.1f} %" if before else "new"
