"""What people look at: the table of a plan."""

from __future__ import annotations

import io
import shutil

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tarantella_pp.partition.graph.units import count, format_bytes, format_seconds
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import StagePlan, common_limit
from tarantella_pp.partition.plan.plan_simulation import stage_seconds

# Share of the work below which a stage without weights is none.
IDLE = 0.01
_WORK = "Work = time by arithmetic or by memory traffic, whichever takes longer."


def table(plan: PlanData) -> Group:
    """Makes a plan's table: one row for each stage, its layers, and the facts of the whole plan."""
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column("Stage", justify="right")
    measured = _is_measured(plan)
    machine = plan.machine or HardwareSpec()
    work = "Time" if measured else "FLOPs" if machine.memory_bandwidth is None else "Work"
    seconds = [sum(both) for both in stage_seconds(plan, machine, plan.micro_batch_size)]
    total = sum(seconds) or 1.0
    for name in ("Ops", "Weights", "State", "Activations", "Memory", work, "Sends"):
        rows.add_column(name, justify="right", overflow="fold")
    largest = max(stage.memory_bytes for stage in plan.stages)
    for i, stage in enumerate(plan.stages):
        memory = format_bytes(stage.memory_bytes, short=True)
        rows.add_row(
            f"{i} x{plan.num_replicas}" if plan.num_replicas > 1 else str(i),
            f"{stage.nodes:,}",
            format_bytes(stage.parameter_bytes + stage.constant_bytes, short=True),
            format_bytes(stage.state_bytes, short=True),
            _activations(stage),
            Text(memory, style="bold" if stage.memory_bytes == largest else ""),
            f"{1e3 * (stage.seconds or 0.0):.3g}ms"
            if measured
            else f"{100 * seconds[i] / total:.1f}%",
            _sends(plan, i),
        )
    # Below the table, for names may be long.
    ends = [s.first if s.nodes == 1 else f"{s.first} .. {s.last}" for s in plan.stages]
    lines = [*(f"Stage {i}: {names}" for i, names in enumerate(ends)), "", *_footer(plan)]
    return Group(Text(_title(plan), style="bold"), rows, *map(Text, lines))


def as_text(plan: PlanData, width: int | None = None) -> str:
    """Writes the table of a plan as plain text."""
    columns = shutil.get_terminal_size((80, 24)).columns if width is None else width
    console = Console(file=io.StringIO(), width=columns, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table(plan), soft_wrap=False)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n"))


def _title(plan: PlanData) -> str:
    nodes, stages = count(len(plan.node_names), "operation"), count(plan.num_stages, "stage")
    ranks = f", {count(plan.num_ranks, 'rank')}" if plan.ranks else ""
    return f"Plan of '{plan.model}': {nodes} on {stages}{ranks}"


def _is_measured(plan: PlanData) -> bool:
    return all(stage.seconds is not None for stage in plan.stages)


def _counts_traffic(plan: PlanData) -> bool:
    """Whether the column of work is not measured, and more than arithmetic."""
    machine = plan.machine
    return bool(machine and machine.memory_bandwidth) and not _is_measured(plan)


def _activations(stage: StagePlan) -> str:
    kept, again = stage.activation_bytes, stage.recomputed_bytes
    more = f"\n+ {format_bytes(again, short=True)}" if again else ""
    return f"{stage.in_flight} x {format_bytes(kept, short=True)}{more}"


def _sends(plan: PlanData, stage: int) -> str:
    sent = [(cut, len(cut.targets)) for cut in plan.cuts if cut.source == stage]
    if not sent:
        return "-"
    messages = sum(times * (2 if cut.mask_bytes else 1) for cut, times in sent)
    size = format_bytes(plan.sent_bytes(stage), short=True)
    return size if messages == 1 else f"{size} ({messages})"


def _footer(plan: PlanData) -> list[str]:
    bubble = "" if plan.bubble is None else f", bubble {100 * plan.bubble:.1f} %"
    replicas = "" if plan.num_replicas == 1 else f" on {plan.num_replicas} replicas"
    lines = [
        (
            f"Schedule {plan.schedule}: {count(plan.num_micro_batches, 'micro-batch')} of "
            f"{count(plan.micro_batch_size, 'sample')}, "
            f"batch of {plan.batch_size}{replicas}{bubble}."
        ),
        *step_lines(plan),
        _quality(plan),
        *([_WORK] if _counts_traffic(plan) else []),
        f"State = weights + gradients + optimizer state of {plan.optimizer}.",
        "Activations = micro-batches in flight x bytes of one.",
        "Memory = State + Activations + peak temporaries + message buffers.",
    ]
    if plan.ranks:
        lines.append(f"Ranks: {'; '.join(_rank(plan, rank) for rank in range(plan.num_ranks))}.")
    if plan.wire_dtype is not None:
        lines.append(f"Activations and their gradients are sent as {plan.wire_dtype}.")
    lines += _replicas(plan)
    for tie in plan.ties:
        where = ", ".join(map(str, tie.stages))
        size = format_bytes(tie.bytes)
        lines.append(f"Stages {where} share {tie.weight} ({size}): {tie.stages[0]} trains it.")
    if plan.recomputes():
        again = (i for i in range(plan.num_stages) if plan.recomputes(i))
        shares = [f"stage {i} {100 * plan.stages[i].repeated:.0f} %" for i in again]
        early = len(plan.schedule_spec().make(plan.num_micro_batches).repeated)
        waiting = f", {early} times while its rank would wait" * bool(early)
        lines.append(
            f"Recomputing: {', '.join(shares)} of its forward pass{waiting}; + is what one makes "
            "again."
        )
    if plan.limits is not None:
        limit = common_limit(plan.limits)
        where, shown = ("the stages", plan.limits) if limit is None else ("a stage", (limit,))
        lines.append(f"Memory limit of {where}: {', '.join(map(format_bytes, shown))}.")
    if plan.assumed_size is not None:
        lines.append(f"Unknown dimensions are counted as {plan.assumed_size}.")
    if _is_measured(plan):
        lines.append("Time is measured, of one micro-batch forward and backward.")
    lines += [f"No split backward pass, {reason}." for reason in plan.fallbacks]
    if plan.outputs is not None and plan.outputs.at_once is not None:
        lines.append(f"Outputs of a whole batch are kept: {plan.outputs.at_once}.")
    work = [sum(parts) for parts in stage_seconds(plan, HardwareSpec(), 1.0)]
    for i, stage in enumerate(plan.stages):
        if not stage.parameter_bytes + stage.constant_bytes and work[i] < IDLE * sum(work):
            lines.append(f"Stage {i} has no weights and next to no work: fewer stages would do.")
    if plan.kept_whole:
        lines.append(f"Layers that stay whole: {'; '.join(plan.kept_whole)}.")
    if plan.estimated:
        lines.append(f"Costs are guesses for: {', '.join(plan.estimated)}.")
    return lines


def _replicas(plan: PlanData) -> list[str]:
    """Which ranks are which, where there are several pipelines."""
    if plan.num_replicas == 1:
        return []
    shown = [
        f"replica {replica} has "
        + ("ranks " if plan.num_ranks > 1 else "rank ")
        + ", ".join(str(plan.world_rank(replica, p)) for p in range(plan.num_ranks))
        for replica in (0, 1)
    ]
    more = "; ..." if plan.num_replicas > 2 else "."
    counts = [len(stage.reduced_bytes) for stage in plan.stages]
    size = format_bytes(plan.fusion_threshold)
    sent = "" if plan.gradient_dtype is None else f", sent as {plan.gradient_dtype}"
    shared = "Replicas share out the optimizer state; counted is the largest share."
    return [
        f"Placement {plan.placement}: {'; '.join(shown)}{more}",
        f"Gradients are summed over replicas by buckets, {sum(counts)} of up to {size}{sent}.",
        *([shared] if plan.shard_optimizer else []),
    ]


def _rank(plan: PlanData, rank: int) -> str:
    stages = [i for i, own in enumerate(plan.ranks) if own == rank]
    memory = format_bytes(sum(plan.stages[i].memory_bytes for i in stages), short=True)
    return f"{rank} has stages {', '.join(map(str, stages))} ({memory})"


def _quality(plan: PlanData) -> str:
    proof = plan.certificate
    units = {"flops": "{:.4g} FLOPs per sample", "time": "{:.4g} s per micro-batch"}
    value, bound = (
        units[plan.balance].format(v) if plan.balance in units else format_bytes(v)
        for v in (proof.value, proof.lower_bound)
    )
    what = "rank" if plan.ranks else "stage"
    traffic = plan.balance == "flops" and _counts_traffic(plan)
    note = ", memory traffic counted in" if traffic else ""
    how = "as given" if plan.balance == "given" else f"by {plan.balance}"
    return (
        f"Balanced {how}: largest {what} {value}{note}, {proof.verdict(bound)} "
        f"({proof.method}, {proof.seconds:.2g} s)."
    )


def step_lines(plan: PlanData) -> list[str]:
    """Returns the line that says how long a step takes, where that was simulated."""
    if plan.step_seconds is None:
        return []
    return [f"A step takes {format_seconds(plan.step_seconds)}, simulated."]
