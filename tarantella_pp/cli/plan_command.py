"""`tarantella plan`: makes, shows and exports plans."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tarantella_pp.cli import inputs
from tarantella_pp.cli.inputs import positive_int
from tarantella_pp.cli.output import add_subcommands, check_target, write_table
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files import replace_file

if TYPE_CHECKING:
    from tarantella_pp.partition.plan.plan import Plan


# Arguments of `plan make` that `make_plan` does not take under their names.
_NO_OPTIONS = ("run", "model", "output", "html", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella plan` and their options."""
    make, show, export = add_subcommands(
        parser,
        make=(_make, "plan the stages of a model or of a graph"),
        show=(_show, "print the table of a plan"),
        export=(_export, "write the schedule and the split of a plan for others"),
    )
    _add_make(make)
    for subcommand in (show, export):
        subcommand.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    export.add_argument("--to", choices=("torchtitan",), required=True,
        help="for whom: PLAN.schedule.csv is in torch.distributed.pipelining's format, "
        "PLAN.modules.json has the names of each stage's modules")  # fmt: skip
    for subcommand in (make, show):
        subcommand.add_argument("--html", metavar="FILE",
            help="write a page with stages, memory, timeline and operations, which needs no "
            "network")  # fmt: skip
        subcommand.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = "exit codes: 0 done; 1 failed; 2 usage, or a malformed file."


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL --stages S [options]"
    add = parser.add_argument
    add("model", metavar="MODEL", help=inputs.HELP)
    add("--stages", dest="num_stages", type=positive_int, metavar="S",
        help="number of pipeline stages")  # fmt: skip
    add("--ranks", dest="num_ranks", type=positive_int, metavar="N",
        help="ranks for stages x replicas, instead of these: choose the fastest")  # fmt: skip
    add("--stages-per-rank", type=positive_int, metavar="V",
        help="stages of a rank (default: 2 with interleaved, and with a V; else 1)")  # fmt: skip
    add("--balance", type=_numbers, metavar="WHAT",
        help="memory, flops or time (default: with which a step is fastest), or a number of layers "
        "for each stage: 526,551")  # fmt: skip
    add("--memory-limit", type=lambda t: t.split(",") if "," in t else t, metavar="BYTES",
        help="memory of a stage, e.g. 16GB, or one for each stage: 16GB,8GB")  # fmt: skip
    add("--batch-size", type=positive_int, metavar="N", help="samples of a step (default: 32)")
    add("--micro-batches", dest="num_micro_batches", type=positive_int, metavar="M",
        help="micro-batches of a step (default: as make_plan chooses)")  # fmt: skip
    add("--schedule", metavar="NAME",
        help=f"{inputs.SCHEDULES}, or the text file of a schedule (default: the fastest of some, "
        "else 1f1b)")  # fmt: skip
    machines = f"{inputs.MACHINE} (default: a core, or the GPU that is there)"
    add("--machine", metavar="NAME", help=machines)
    add("--optimizer", metavar="NAME",
        help="whose state counts as memory (default: the model's, else Adam's)")  # fmt: skip
    add("--recompute", type=_numbers, metavar="STAGES",
        help="activation checkpointing: all, none, or stages such as 0,1 that repeat their forward "
        "pass to save memory (default: only where a limit needs it)")  # fmt: skip
    add("--replicas", dest="num_replicas", type=positive_int, metavar="R",
        help="pipelines side by side, which share the batch (default: 1)")  # fmt: skip
    add("--placement", choices=("pipelines-together", "replicas-together"),
        help="which ranks are neighbours: a pipeline's (default) or a stage's")  # fmt: skip
    add("--fusion-threshold", metavar="BYTES",
        help="most bytes of gradients that replicas sum at a time (default: 32MiB)")  # fmt: skip
    add("--shard-optimizer", action="store_true", default=None,
        help="replicas share out the optimizer state (ZeRO-1)")  # fmt: skip
    add("--gradient-dtype", choices=("bfloat16",),
        help="in what gradients travel between replicas (default: as they are)")  # fmt: skip
    add("--wire-dtype", choices=("bfloat16",),
        help="in what activations and their gradients travel (default: as they are)")  # fmt: skip
    add("-o", "--output", metavar="FILE", help="write the plan to this JSON file")


def _numbers(text: str) -> str | list[int]:
    """Reads numbers; all else is for the planner to judge."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdigit() for part in parts) else text


def _make(arguments: argparse.Namespace) -> int:
    check_target("--output", arguments.output, arguments.model)
    check_target("--html", arguments.html, arguments.model, arguments.output)
    options = {k: v for k, v in vars(arguments).items() if k not in _NO_OPTIONS and v is not None}
    counted = {"num_stages", "num_ranks"} & {*options} or isinstance(arguments.balance, list)
    if not counted and not Path(arguments.schedule or "").is_file():
        raise ConfigurationError(
            "Expected --stages, or --ranks to choose their number. Received: neither"
        )
    # Time is measured, which needs weights.
    timed = arguments.balance == "time" and not inputs.is_graph(arguments.model)
    build = inputs.build_model if timed else inputs.build_without_weights
    model = build(arguments.model)
    with inputs.quiet_keras("A plan"):
        from tarantella_pp import make_plan

    if arguments.optimizer is None:
        options["optimizer"] = inputs.optimizer_of(arguments.model, model)
    plan = make_plan(model, **options)
    if arguments.output is not None:
        plan.save(arguments.output)
    return _write(plan, arguments)


def _show(arguments: argparse.Namespace) -> int:
    check_target("--html", arguments.html, arguments.plan)
    return _write(inputs.load_plan(arguments.plan), arguments)


# Our computations as torch.distributed.pipelining calls them.
_IN_TORCH = {"F": "F", "B": "I", "W": "W", "BW": "B"}


def _export(arguments: argparse.Namespace) -> int:
    plan = inputs.load_plan(arguments.plan)
    for problem in _without_words(plan):
        raise ConfigurationError(
            f"torchtitan has no words for this plan: {problem}. Received: '{arguments.plan}'"
        )
    schedule = plan.schedule_spec().make(plan.num_micro_batches)
    rows: list[list[str]] = [[] for _ in schedule.actions]
    for a in schedule.computations():
        if kind := _IN_TORCH.get(a.kind):
            rows[schedule.placement[a.stage]].append(f"{a.stage}{kind}{a.micro_batch}")
    modules: list[list[str]] = [[] for _ in plan.stages]
    for name, stage in zip(plan.node_names, plan.assignment, strict=True):
        modules[stage].append(name)
    table, names = map(Path(arguments.plan).with_suffix, (".schedule.csv", ".modules.json"))
    text = "".join(f"{','.join(row)}\n" for row in rows)
    replace_file(table, lambda draft: draft.write_text(text))
    replace_file(names, lambda draft: draft.write_text(f"{json.dumps(modules, indent=1)}\n"))
    settings = {
        "pipeline_parallel_degree": schedule.num_ranks,
        "pipeline_parallel_schedule_csv": f'"{table}"',
        "pipeline_parallel_microbatch_size": plan.micro_batch_size,
        "module_fqns_per_model_part": f"the lists in {names}",
    }
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    sys.stdout.write(f"Wrote {table} and {names}. In torchtitan, under [parallelism]:\n\n{lines}")
    return 0


def _without_words(plan: Plan) -> Iterator[str]:
    """What of a plan PyTorch's pipelines cannot do."""
    spec = plan.schedule_spec()
    for stage, rank in enumerate(spec.placement):
        if rank != (there := stage % spec.num_ranks):
            yield f"schedule {plan.schedule} has stage {stage} on rank {rank}, not on rank {there}"
    for source, target in sorted(plan.links):
        if target != source + 1:
            yield f"stage {source} sends to stage {target}, past its neighbour"
    for tie in plan.ties:
        yield f"stages {', '.join(map(str, tie.stages))} share '{tie.weight}'"
    if plan.batch_size != plan.micro_batch_size * plan.num_micro_batches * plan.num_replicas:
        yield (
            f"batch_size={plan.batch_size} makes {plan.num_micro_batches} micro-batches on "
            f"{plan.num_replicas} replicas of unlike sizes; make a plan that divides it"
        )
    if plan.recomputes():
        yield "stages repeat their forward pass; use --recompute none, and its own checkpointing"


def _write(plan: Plan, arguments: argparse.Namespace) -> int:
    """Writes a plan to stdout, and its page if one is asked for; returns the exit code."""
    if arguments.html is not None:
        from tarantella_pp.partition.plan.page import render_html

        try:
            page = render_html(plan)
            replace_file(arguments.html, lambda draft: draft.write_text(page, encoding="utf-8"))
        except FileError as error:
            raise ConfigurationError(str(error)) from error
    if arguments.json:
        sys.stdout.write(f"{plan.to_json()}\n")
    else:
        write_table(*([f"Wrote {arguments.html}."] if arguments.html else []), plan)
    return 0
