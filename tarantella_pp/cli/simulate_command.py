"""`tarantella simulate`: the step of a plan on a machine that need not be there."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from typing import Any

import msgspec

from tarantella_pp.cli import inputs
from tarantella_pp.cli.output import table, write_table
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph import units
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, machine_of
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, ScalePoint
from tarantella_pp.schedule import StepTimeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella simulate`."""
    parser.set_defaults(run=run)
    parser.usage = "%(prog)s PLAN [options]"
    parser.description = (
        "Plays one step of a plan on ranks that need not be there: step time, bubble, peak memory, "
        "and how it scales with replicas. Stages that were measured take the seconds that the plan "
        "has; others take their arithmetic and memory traffic on --machine."
    )
    add = parser.add_argument
    add("plan", metavar="PLAN", help="the plan's JSON file, of a Keras model")
    add("--replicas", type=inputs.positive_int, metavar="R",
        help="pipelines side by side, each with its own batch (default: the plan's)")  # fmt: skip
    add("--machine", metavar="NAME", help=f"{inputs.MACHINE} (default: the plan's)")
    add(
        "--link-bandwidth",
        metavar="BYTES",
        help="per second between ranks, each way, e.g. 1.25GB (default: the machine's)",
    )
    add("--schedule", metavar="NAME", help=f"{inputs.SCHEDULES} (default: the plan's)")
    add("--micro-batches", type=inputs.positive_int, metavar="M",
        help="micro-batches of the same batch (default: the plan's)")  # fmt: skip
    add("--ranks", type=inputs.positive_int, metavar="N",
        help="ranks of one pipeline, a divisor of the stages (default: one per stage)")  # fmt: skip
    add("--timeline", action="store_true", help="draw what each rank does when")
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.epilog = "exit codes: 0 done; 1 failed; 2 usage, or a malformed file."


def run(arguments: argparse.Namespace) -> int:
    """Prints the simulation."""
    plan = inputs.load_plan(arguments.plan)
    machine = _machine(arguments, plan.machine)
    schedule = arguments.schedule or plan.schedule
    micro_batches = arguments.micro_batches or plan.num_micro_batches
    if schedule == "forward":
        raise ConfigurationError("A step trains. Received: --schedule=forward")
    simulation = PlanSimulation(plan, machine, schedule, micro_batches)
    if micro_batches > simulation.samples:
        raise ConfigurationError(
            f"Each micro-batch needs a sample, and a replica has {simulation.samples}. "
            f"Received: --micro-batches={micro_batches}"
        )
    replicas = arguments.replicas or plan.num_replicas
    step = simulation.step(arguments.ranks)
    point, curve = simulation.point(step, replicas), simulation.curve(step)
    # What bubble would be left with links that take no time: stages that are uneven, or too few
    # micro-batches.
    balance = simulation.without_messages().step(arguments.ranks).bubble_fraction
    if arguments.json:
        found = _as_dict(simulation, step, point, curve)
        found["bubble_without_messages"] = balance
        sys.stdout.write(f"{json.dumps(found, indent=1, allow_nan=False)}\n")
        return 0
    write_table(*_summary(simulation, step, point, balance), _rank_table(step))
    if arguments.timeline:
        timeline = simulation.replicated(step, replicas)
        width = max(40, shutil.get_terminal_size((100, 24)).columns - 12)
        write_table(timeline.to_text(width))
    write_table("Scaling, with the same work for each replica:", _curve_table(curve))
    write_table(*(f"Assumed: {line}" for line in _assumptions(simulation)))
    return 0


def _machine(arguments: argparse.Namespace, planned: HardwareSpec | None) -> HardwareSpec:
    """Returns the machine that a plan was made for, with what the command line says otherwise."""
    machine = planned or HardwareSpec()
    if arguments.machine is not None:
        machine = machine_of(arguments.machine)
    if arguments.link_bandwidth is None:
        return machine
    bandwidth = units.parse_bytes(arguments.link_bandwidth, "--link-bandwidth")
    return msgspec.structs.replace(machine, bandwidth=float(bandwidth))


def _summary(
    simulation: PlanSimulation, step: StepTimeline, point: ScalePoint, balance: float
) -> list[Any]:
    from rich.text import Text

    plan, sums, percent = simulation.plan, point.exposed_seconds, units.percent
    summed = f", of which {units.format_seconds(sums)} wait for sums of gradients" if sums else ""
    title = (
        f"A step of '{plan.model}': {units.count(plan.num_stages, 'stage')} on "
        f"{units.count(point.num_ranks, 'rank')}, {simulation.schedule}, "
        f"{units.count(simulation.micro_batches, 'micro-batch')} of {simulation.micro_batch_size}, "
        f"{units.count(point.num_replicas, 'replica')}"
    )
    return [
        Text(title, style="bold"),
        f"Step:       {units.format_seconds(point.step_seconds)}{summed}",
        f"Throughput: {point.samples_per_second:.4g} samples/s, {point.speed_up:.2f} x one rank",
        f"Bubble:     {percent(step.bubble_fraction)}, {percent(balance)} without messages",
        f"Memory:     {units.format_bytes(max(step.peak_bytes))} on the largest rank",
    ]


def _rank_table(step: StepTimeline) -> Any:
    rows = []
    for rank, (busy, peak) in enumerate(zip(step.busy_seconds, step.peak_bytes, strict=True)):
        stages = " ".join(str(s) for s, owner in enumerate(step.placement) if owner == rank)
        idle = units.percent(step.idle_fraction(rank))
        rows.append((rank, stages, units.format_seconds(busy), idle, units.format_bytes(peak)))
    return table(("Rank", "Stages", "Computes", "Idle", "Memory"), rows)


def _curve_table(curve: list[ScalePoint]) -> Any:
    rows = [
        (f"{one.num_ranks:,}", f"{one.num_replicas:,}", units.format_seconds(one.step_seconds),
         f"{one.samples_per_second:.4g}", f"{one.speed_up:.4g}", units.percent(one.efficiency))
        for one in curve
    ]  # fmt: skip
    return table(("Ranks", "Replicas", "Step", "Samples/s", "Speed-up", "Efficiency"), rows)


def _as_dict(
    simulation: PlanSimulation, step: StepTimeline, point: ScalePoint, curve: list[ScalePoint]
) -> dict[str, Any]:
    plan = simulation.plan
    ranks = zip(step.busy_seconds, step.peak_bytes, strict=True)
    return {
        "model": plan.model, "schedule": simulation.schedule, "num_stages": plan.num_stages,
        "num_micro_batches": simulation.micro_batches,
        "micro_batch_size": simulation.micro_batch_size,
        "machine": msgspec.to_builtins(simulation.machine),
        "bubble": step.bubble_fraction, "pipeline_seconds": step.pipeline_seconds,
        "peak_bytes": max(step.peak_bytes), **point._asdict(),
        "ranks": [{"busy_seconds": busy, "peak_bytes": peak} for busy, peak in ranks],
        "scaling": [one._asdict() for one in curve],
        "assumptions": _assumptions(simulation),
    }  # fmt: skip


def _assumptions(simulation: PlanSimulation) -> list[str]:
    plan, machine = simulation.plan, simulation.machine
    measured = [str(i) for i, stage in enumerate(plan.stages) if stage.seconds is not None]
    lines = []
    if len(measured) < plan.num_stages:
        lines.append(
            f"a rank does {machine.flops_per_second / 1e12:g} TFLOP/s on every layer; a backward "
            "pass takes twice its forward pass, half for inputs and half for weights."
        )
    if measured:
        lines.append(f"stages {', '.join(measured)} take the seconds that the plan has of them.")
    bandwidth = (machine.bandwidth or math.inf) / 1e9
    return [
        *lines,
        f"links do {bandwidth:g} GB/s each way after {machine.latency * 1e6:g} us.",
        "each replica has the plan's samples; they sum gradients in a ring, while ranks compute.",
        "updates of weights, reading data and the framework's own time are left out.",
    ]
