"""`tarantella plan make`: plans the stages of a model or of a graph."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.io import model_source, quantities
from tarantella_pp.cli.io.output import check_target
from tarantella_pp.cli.io.quantities import positive_int
from tarantella_pp.cli.plan_show import add_page, check_page, show, write_page
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.layer_graph import LayerGraph
    from tarantella_pp.partition.options import Recompute
    from tarantella_pp.partition.plan.plan import Plan

_NAMED = ("num_stages", "balance", "memory_limit")
"""Options that are read here; all others are handed on as they are."""

_RECOMPUTATIONS = ("all", "except_last", "none")
"""What stands behind `--recompute`, for all stages or behind the number of one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella plan make`."""
    parser.usage = "%(prog)s MODEL --stages S [options]"
    add = parser.add_argument
    add("model", metavar="MODEL", help=model_source.HELP)
    add("--stages", dest="num_stages", type=positive_int, metavar="S",
        help="number of pipeline stages")  # fmt: skip
    add("--ranks", dest="num_ranks", type=positive_int, metavar="N",
        help="ranks for stages x replicas, instead of these: choose the fastest")  # fmt: skip
    add("--stages-per-rank", type=positive_int, metavar="V",
        help="stages of a rank (default: 2 with interleaved and zb-v, else 1)")  # fmt: skip
    add("--balance", metavar="WHAT",
        help="memory, flops or time (default: with which a step is fastest), or a number of layers "
        "for each stage: 526,551")  # fmt: skip
    add("--memory-limit", metavar="BYTES",
        help="memory of a stage, e.g. 16GB, or one for each stage: 16GB,8GB")  # fmt: skip
    add_model_options(parser)
    add("--replicas", dest="num_replicas", type=positive_int, metavar="R",
        help="pipelines side by side, which share the batch (default: 1)")  # fmt: skip
    add("--placement", choices=("pipelines-together", "replicas-together"),
        help="which ranks are neighbours: those of a pipeline (default) or of a stage")  # fmt: skip
    add("--fusion-threshold", metavar="BYTES",
        help="most bytes of gradients that replicas sum at a time (default: 32MiB)")  # fmt: skip
    add("--shard-optimizer", action="store_true", default=None,
        help="replicas share out the optimizer state (ZeRO-1)")  # fmt: skip
    add("--gradient-dtype", choices=("bfloat16",),
        help="in what gradients travel between replicas (default: as they are)")  # fmt: skip
    add("--wire-dtype", choices=("bfloat16",),
        help="in what activations and their gradients travel (default: as they are)")  # fmt: skip
    add("-o", "--output", metavar="FILE", help="write the plan to this JSON file")
    add_page(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what a step of a Keras model needs."""
    add = parser.add_argument
    add("--batch-size", type=positive_int, metavar="N", help="samples of a step (default: 32)")
    add("--micro-batches", dest="num_micro_batches", type=positive_int, metavar="M",
        help="micro-batches of a step (default: as make_plan chooses)")  # fmt: skip
    add("--schedule", metavar="NAME",
        help="gpipe, 1f1b, eager-1f1b or zb-h1; to make a plan interleaved, zb-v, zb-auto or the "
        "text file of a schedule as well (default: the fastest of some, else 1f1b)")  # fmt: skip
    add(
        "--machine",
        metavar="NAME",
        help=f"{quantities.MACHINE} (default: a core, or the GPU that is there)",
    )
    add("--optimizer", metavar="NAME",
        help="whose state counts as memory (default: the model's, else Adam's)")  # fmt: skip
    add("--recompute", metavar="STAGES",
        help="activation checkpointing: all, except_last, none, or stages such as 0,1 or "
        "0:except_last,1 that repeat their forward pass to save memory, of all micro-batches or of "
        "all but the last (default: only where a limit needs it)")  # fmt: skip


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns those of the model's options that were given."""
    from tarantella_pp.partition.options import PlanOptions

    names = [name for name in PlanOptions.__dataclass_fields__ if name not in _NAMED]
    values = {name: getattr(arguments, name, None) for name in names}
    if values["recompute"] is not None:
        values["recompute"] = _stages(values["recompute"])
    return {name: value for name, value in values.items() if value is not None}


def run(arguments: argparse.Namespace) -> int:
    """Makes the plan, writes it to its file, draws and prints it."""
    check_target(arguments.output)
    check_page(arguments)
    plan, graph = _planned(arguments)
    if arguments.output is not None:
        plan.save(arguments.output)
    write_page(plan, graph, arguments)
    show(plan, as_json=arguments.json)
    return 0


def _planned(arguments: argparse.Namespace) -> tuple[Plan, LayerGraph | None]:
    """Makes the plan; with it comes the layer graph where pictures need it."""
    open_stages = arguments.num_stages is None and arguments.num_ranks is None
    open_stages = open_stages and given_balance(arguments.balance) is None
    if open_stages and not Path(arguments.schedule or "").is_file():
        raise ConfigurationError(
            "Expected --stages, or --ranks to choose their number. Received: neither"
        )
    # Time is measured, which needs weights.
    timed = arguments.balance == "time" and not model_source.is_graph(arguments.model)
    build = model_source.build_model if timed else model_source.build_without_weights
    model = build(arguments.model)
    plan = _plan_of_model(arguments, model)
    if arguments.html is None:
        return plan, None
    if model_source.is_graph(arguments.model):
        return plan, model.graph
    from tarantella_pp.partition.extraction.keras_reader import extract

    return plan, extract(model).graph


def _plan_of_model(arguments: argparse.Namespace, model: Any) -> Plan:
    from tarantella_pp import make_plan

    options = model_options(arguments)
    if "optimizer" not in options:
        options["optimizer"] = model_source.optimizer_of(arguments.model, model)
    if arguments.balance is not None:
        options["balance"] = given_balance(arguments.balance) or arguments.balance
    if arguments.memory_limit is not None:
        limits = arguments.memory_limit.split(",")
        options["memory_limit"] = limits if len(limits) > 1 else limits[0]
    return make_plan(model, arguments.num_stages, **options)


def given_balance(text: str | None) -> list[int] | None:
    """Reads numbers of layers, one for each stage."""
    parts = (text or "").split(",")
    return [int(part) for part in parts] if all(part.strip().isdigit() for part in parts) else None


def _stages(text: str) -> Recompute:
    """Reads `all`, `except_last`, `none` or stages, each with one of these or without."""
    if text in _RECOMPUTATIONS:
        return text
    pairs = [part.partition(":") for part in text.split(",")]
    named = all(how in _RECOMPUTATIONS if colon else not how for _, colon, how in pairs)
    try:
        hows = {int(stage): how or "all" for stage, _, how in pairs}
    except ValueError:
        named, hows = False, {}
    if named and len(hows) == len(pairs):
        return hows
    raise ConfigurationError(
        "Expected all, except_last, none, or different stages such as 0,1 or 0:except_last,1. "
        f"Received: --recompute={text}"
    )
