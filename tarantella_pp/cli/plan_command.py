"""`tarantella plan`: makes, shows, checks and compares plans; `compare` and `diff` are here."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli import inputs, plan_make
from tarantella_pp.cli.inputs import positive_int
from tarantella_pp.cli.output import add_subcommands, table, write_json, write_table
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.baselines import Comparison
    from tarantella_pp.partition.options import Settings
    from tarantella_pp.partition.plan.plan import Plan
    from tarantella_pp.partition.planner import Planner

DESCRIPTION = """\
Prices four plans by their largest stage: ours; equal numbers of layers; parameter balance, as
DeepSpeed's partition_method="parameters"; cost balance, close to how torchgpipe balances. The
other rules cut the order of the graph; ours chooses among all orders. With --balance also the
stages that it gives."""
# What `plan diff` compares of stages.
_FIGURES = ("memory_bytes", "flops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    make, show, check, diff, compare = add_subcommands(
        parser,
        make=(plan_make.make, "plan the stages of a model or of a graph"),
        show=(plan_make.show, "print the table of a plan"),
        check=(plan_make.check, "check that a plan belongs to a model"),
        diff=(run_diff, "say what two plans do differently"),
        compare=(run_compare, "compare with the rules by which other libraries cut"),
    )
    plan_make.add_make(make)
    for subcommand in (show, check):
        subcommand.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    plan_make.add_page(show)
    check.add_argument("model", metavar="MODEL", help=inputs.HELP)
    diff.add_argument("before", metavar="BEFORE", help="JSON file of the first plan")
    diff.add_argument("after", metavar="AFTER", help="JSON file of the second plan")
    _add_compare(compare)
    for subcommand in (make, show, check, diff, compare):
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "exit codes: 0 done; 1 failed, or the plan does not fit; 2 usage, or a malformed file."
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
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
    """Prints the comparison, of memory and of FLOPs."""
    model = inputs.build_without_weights(arguments.model)
    with inputs.quiet_keras("A comparison"):
        from tarantella_pp.models.make_plan import default_machine
    from tarantella_pp.partition.options import PlanOptions, assignment_of
    from tarantella_pp.partition.plan.hardware_spec import machine_of
    from tarantella_pp.partition.planner import Planner

    given = plan_make.given_balance(arguments.balance)
    if given is None and arguments.balance is not None:
        raise ConfigurationError(
            f"Expected numbers of layers such as 526,551. Received: --balance={arguments.balance}"
        )
    stages = arguments.num_stages or len(given or ())
    if not stages or (given is not None and len(given) != stages):
        raise ConfigurationError(
            "Expected --stages, --balance, or both of as many stages. "
            f"Received: --stages={arguments.num_stages}, --balance={arguments.balance}"
        )
    chosen = plan_make.model_options(arguments)
    optimizer = chosen.pop("optimizer", None) or inputs.optimizer_of(arguments.model, model)
    machine = machine_of(chosen.pop("machine")) if "machine" in chosen else default_machine()
    planner = Planner.of(model, optimizer, machine=machine)
    nodes = len(planner.graph.nodes)
    if stages > nodes:
        raise ConfigurationError(
            f"{arguments.model} has {nodes} operations. Received: --stages={stages}"
        )
    own = {} if given is None else {"given": assignment_of(planner.graph, given)}
    comparisons = []
    for balance in ("memory", "flops"):
        options = PlanOptions(num_stages=stages, balance=balance, **chosen).settled()
        comparisons.append(_compared(planner, options, own))
    if arguments.json:
        objectives = {one.objective: one.to_dict() for one in comparisons}
        write_json({"model": planner.model, "num_stages": stages, "objectives": objectives})
    else:
        write_table(*_tables(planner.model, stages, comparisons))
    return 0


def _compared(planner: Planner, options: Settings, own: dict[str, tuple[int, ...]]) -> Comparison:
    """Prices the largest stage of our plan, of the rules' plans and of a given balance."""
    import numpy as np

    from tarantella_pp.partition.baselines import OURS, Comparison, by_rules
    from tarantella_pp.partition.best_stages import state_sums, sums_of

    costs = planner.costs(options)

    def value(assignment: Sequence[int]) -> float:
        if options.balance == "flops":
            return float(np.bincount(assignment, costs.flops()).max())
        stages = costs.stages(assignment, options.in_flight, options.repeats)
        return float(max(stage.memory_bytes for stage in stages))

    ours = planner.solve(options)
    rules = by_rules(planner.blocks, sums_of(costs, options), state_sums(costs))
    values = {name: value(a) for name, a in {OURS: ours.assignment, **rules, **own}.items()}
    return Comparison(options.balance, ours.certificate, values)


def _tables(name: str, num_stages: int, comparisons: Sequence[Comparison]) -> list[Any]:
    """Makes the table: a row for each rule, a value and a ratio for each objective."""
    from rich.text import Text

    titles = {"memory": "Memory", "flops": "FLOPs"}
    rows = []
    for rule in comparisons[0].values:
        cells = [rule]
        for one in comparisons:
            ratio = one.ratio(rule)
            cells += [f"{one.values[rule]:.6g}", "-" if ratio is None else f"{ratio:.3f}"]
        rows.append(cells)
    heads = [head for one in comparisons for head in (titles[one.objective], "/ ours")]
    title = Text(f"Largest stage of '{name}' on {num_stages} stages", style="bold")
    proofs = [
        Text(f"{titles[one.objective]} of ours: {proof.verdict()} ({proof.method}).")
        for one in comparisons
        for proof in (one.certificate,)
    ]
    return [title, table(["Rule", *heads], rows, left=("Rule",)), *proofs]


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
    # Nodes are known by their names; names that Keras has numbered anew by their places, where both
    # plans are of the same model.
    from tarantella_pp.partition.plan.plan_parts import PlanConfig

    same = before.fingerprint == after.fingerprint
    old, new = before.node_names, before.node_names if same else after.node_names
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
    for move in moves:
        several = "" if move["nodes"] == 1 else f" .. {move['last']} ({move['nodes']})"
        yield f"  {move['before']} -> {move['after']}  {move['first']}{several}"


def _shown(value: Any) -> Any:
    """Returns what a value is shown as; a schedule as its beginning."""
    text = str(value)
    return f"{text[:40]} ..." if len(text) > 80 or "\n" in text else value


def _stage_table(stages: Sequence[dict[str, Any]]) -> Any:
    """Makes the table of what stages cost, before and after."""
    from tarantella_pp.partition.graph.units import format_bytes, format_flops

    rows = []
    for index, stage in enumerate(stages):
        memory = ["-" if size is None else format_bytes(size) for size in stage["memory_bytes"]]
        work = ["-" if flops is None else format_flops(flops) for flops in stage["flops"]]
        rows.append((index, *memory, *work))
    return table(("Stage", "Memory", "after", "FLOPs", "after"), rows)
