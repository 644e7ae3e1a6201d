"""`tarantella simulate`: the step of a plan on a machine that need not be there."""

from __future__ import annotations

import argparse
import math
import shutil
from dataclasses import replace
from typing import Any

import msgspec

from tarantella_pp.cli import inputs
from tarantella_pp.cli.output import table, write_json, write_table
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.units import count, format_bytes, format_seconds, percent
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, machine_of
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, ScalePoint
from tarantella_pp.simulation.network import Nodes
from tarantella_pp.simulation.simulator import StepTimeline, idle_fraction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella simulate`."""
    parser.set_defaults(run=run)
    parser.usage = "%(prog)s PLAN [options]"
    parser.description = (
        "Plays one step of a plan on ranks that need not be there: step time, bubble, peak memory, "
        "and how it scales with replicas. Stages that were measured take the seconds that the plan "
        "has; others take their arithmetic at --speed."
    )
    add = parser.add_argument
    add("plan", metavar="PLAN", help="the plan's JSON file, of a Keras model")
    add("--replicas", type=inputs.positive_int, metavar="R",
        help="pipelines side by side, each with its own batch (default: the plan's)")  # fmt: skip
    add("--machine", metavar="NAME", help=f"{inputs.MACHINE} (default: the plan's)")
    add("--speed", type=inputs.flops_per_second, metavar="TFLOPS",
        help="what a rank reaches, in TFLOP/s or e.g. 500GFLOPs (default: the machine's, else 1); "
        "of another one than the plan's nothing else is known")  # fmt: skip
    add("--link-bandwidth", type=inputs.bytes_per_second, metavar="B",
        help="between ranks, in each direction, e.g. 10GB or 100Gbit "
        "(default: the plan's, else 10GB)")  # fmt: skip
    add("--link-latency", type=inputs.seconds, metavar="T",
        help="of each message, e.g. 5us (default: the plan's, else 5us)")  # fmt: skip
    add("--schedule", metavar="NAME",
        help="gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v or zb-auto "
        "(default: the plan's)")  # fmt: skip
    add("--micro-batches", type=inputs.positive_int, metavar="M",
        help="micro-batches of the same batch (default: the plan's)")  # fmt: skip
    add("--ranks", type=inputs.positive_int, metavar="N",
        help="ranks of one pipeline, a divisor of the stages (default: one per stage)")  # fmt: skip
    _add_hosts(parser.add_argument_group("many ranks"))
    add("--timeline", action="store_true", help="draw what each rank does when")
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.epilog = "exit codes: 0 done; 1 failed; 2 usage, or a malformed file."


def _add_hosts(group: Any) -> None:
    """Adds the shape of the hosts."""
    add = group.add_argument
    add("--nodes", type=inputs.positive_int, metavar="N",
        help="hosts, all full: as many replicas as they hold; needs --ranks-per-node")  # fmt: skip
    add("--ranks-per-node", type=inputs.positive_int, metavar="K",
        help="ranks of a host, which share its network card (default: one)")  # fmt: skip
    add("--nic", type=inputs.bytes_per_second, metavar="B",
        help="what a host's card does in each direction (default: as between ranks)")  # fmt: skip
    add("--inside", type=inputs.bytes_per_second, metavar="B",
        help="between two ranks of a host (default: as between ranks)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints the simulation."""
    plan = inputs.load_plan(arguments.plan)
    machine = _machine(arguments, plan.machine)
    schedule = arguments.schedule or plan.schedule
    micro_batches = arguments.micro_batches or plan.num_micro_batches
    if schedule == "forward":
        raise ConfigurationError("A step trains. Received: --schedule=forward")
    nodes = _nodes(arguments, machine)
    simulation = PlanSimulation(plan, machine, schedule, micro_batches, nodes)
    if micro_batches > simulation.samples:
        raise ConfigurationError(
            f"Each micro-batch needs a sample, and a replica has {simulation.samples}. "
            f"Received: --micro-batches={micro_batches}"
        )
    replicas = _replicas(arguments, simulation.spec(arguments.ranks).num_ranks, plan.num_replicas)
    simulation = replace(simulation, num_replicas=replicas)
    step = simulation.step(arguments.ranks)
    point, curve = simulation.point(step, replicas), simulation.curve(step, arguments.ranks)
    # What bubble would be left with links that take no time: stages that are uneven, or too few
    # micro-batches.
    balance = simulation.without_messages().step(arguments.ranks).bubble_fraction
    if arguments.json:
        found = _as_dict(simulation, step, point, curve)
        write_json({**found, "bubble_without_messages": balance})
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
    elif arguments.speed is not None:  # another machine: all else is unknown
        machine = HardwareSpec()
    given = {
        "flops_per_second": arguments.speed,
        "bandwidth": arguments.link_bandwidth,
        "latency": arguments.link_latency,
    }
    known = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(machine, **known)


def _nodes(arguments: argparse.Namespace, machine: HardwareSpec) -> Nodes | None:
    """Returns the hosts that the command line describes."""
    if arguments.ranks_per_node is not None:
        links = (arguments.nic or machine.bandwidth, arguments.inside or machine.bandwidth)
        return Nodes(arguments.ranks_per_node, *links)
    for name in ("nodes", "nic", "inside"):
        if (value := getattr(arguments, name)) is not None:
            raise ConfigurationError(
                f"Hosts need --ranks-per-node. Received: --{name}={value:g} without it"
            )
    return None


def _replicas(arguments: argparse.Namespace, num_ranks: int, planned: int) -> int:
    """Returns the number of replicas: as given, as many as fill the hosts, or as planned."""
    if arguments.nodes is None:
        return int(arguments.replicas or planned)
    every = arguments.nodes * arguments.ranks_per_node
    if every % num_ranks or arguments.replicas not in (None, every // num_ranks):
        wanted = f" and --replicas={arguments.replicas}" if arguments.replicas else ""
        raise ConfigurationError(
            f"Hosts are filled by whole replicas of {num_ranks} ranks each. Received: "
            f"--nodes={arguments.nodes} with --ranks-per-node={arguments.ranks_per_node}{wanted}"
        )
    return int(every // num_ranks)


def _summary(
    simulation: PlanSimulation, step: StepTimeline, point: ScalePoint, balance: float
) -> list[Any]:
    """Makes the lines at the top."""
    from rich.text import Text

    plan, sums = simulation.plan, point.exposed_seconds
    summed = f", of which {format_seconds(sums)} wait for sums of gradients" if sums else ""
    title = (
        f"A step of '{plan.model}': {count(plan.num_stages, 'stage')} on "
        f"{count(point.num_ranks, 'rank')}, {simulation.schedule}, "
        f"{count(simulation.micro_batches, 'micro-batch')} of {simulation.micro_batch_size}, "
        f"{count(point.num_replicas, 'replica')}"
    )
    return [
        Text(title, style="bold"),
        f"Step:       {format_seconds(point.step_seconds)}{summed}",
        f"Throughput: {point.samples_per_second:.4g} samples/s, {point.speed_up:.2f} x one rank",
        f"Bubble:     {percent(step.bubble_fraction)}, {percent(balance)} without messages",
        f"Memory:     {format_bytes(max(step.peak_bytes))} on the largest rank",
    ]


def _rank_table(step: StepTimeline) -> Any:
    """The ranks of one pipeline."""
    rows = []
    for rank, (busy, peak) in enumerate(zip(step.busy_seconds, step.peak_bytes, strict=True)):
        stages = " ".join(str(s) for s, owner in enumerate(step.placement) if owner == rank)
        idle = percent(idle_fraction([busy], step.pipeline_seconds))
        rows.append((rank, stages, format_seconds(busy), idle, format_bytes(peak)))
    return table(("Rank", "Stages", "Computes", "Idle", "Memory"), rows)


def _curve_table(curve: list[ScalePoint]) -> Any:
    """The scaling curve."""
    rows = [
        (
            f"{point.num_ranks:,}",
            f"{point.num_replicas:,}",
            format_seconds(point.step_seconds),
            f"{point.samples_per_second:.4g}",
            f"{point.speed_up:.4g}",
            percent(point.efficiency),
        )
        for point in curve
    ]
    return table(("Ranks", "Replicas", "Step", "Samples/s", "Speed-up", "Efficiency"), rows)


def _as_dict(
    simulation: PlanSimulation, step: StepTimeline, point: ScalePoint, curve: list[ScalePoint]
) -> dict[str, Any]:
    plan = simulation.plan
    ranks = zip(step.busy_seconds, step.peak_bytes, strict=True)
    return {
        "model": plan.model,
        "schedule": simulation.schedule,
        "num_stages": plan.num_stages,
        "num_micro_batches": simulation.micro_batches,
        "micro_batch_size": simulation.micro_batch_size,
        "machine": msgspec.to_builtins(simulation.machine),
        "bubble": step.bubble_fraction,
        "pipeline_seconds": step.pipeline_seconds,
        "peak_bytes": max(step.peak_bytes),
        "memory_limit": plan.memory_limit,
        **point._asdict(),
        "ranks": [{"busy_seconds": busy, "peak_bytes": peak} for busy, peak in ranks],
        "scaling": [one._asdict() for one in curve],
        "assumptions": _assumptions(simulation),
    }


def _assumptions(simulation: PlanSimulation) -> list[str]:
    """Says what the figures rest on."""
    plan, machine, nodes = simulation.plan, simulation.machine, simulation.nodes
    measured = [i for i, stage in enumerate(plan.stages) if stage.forward_seconds is not None]
    lines, ring = [], "in a ring"
    if len(measured) < plan.num_stages:
        simple = machine.memory_bandwidth is None and not machine.layers
        more = "" if simple else ", and what else `machine` of --json says"
        lines.append(
            f"a rank does {machine.flops_per_second / 1e12:g} TFLOP/s on every layer{more}; a "
            "backward pass takes twice its forward pass, half for inputs and half for weights."
        )
    if measured:
        lines.append(f"stages {_list(measured)} take the seconds that the plan has of them.")
    links = f"links do {_gigabytes(machine.bandwidth)} each way after"
    if nodes is not None:
        ring = "inside each host, then in a ring of hosts"
        links = (
            f"hosts have {nodes.ranks_per_node} ranks, which do {_gigabytes(nodes.inside)} between "
            f"two of them and share a card of {_gigabytes(nodes.card)} each way;"
        )
    lines += [
        f"{links} {machine.latency * 1e6:g} us.",
        f"each replica has the plan's samples; they sum gradients {ring}, while ranks compute.",
        "updates of weights, reading data and the framework's own time are left out.",
    ]
    if plan.recompute:
        lines.append(f"stages {_list(plan.recompute)} repeat their forward pass.")
    return lines


def _gigabytes(speed: float | None) -> str:
    return f"{(speed or math.inf) / 1e9:g} GB/s"


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
