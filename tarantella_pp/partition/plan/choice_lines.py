"""What a plan says of the others that it was chosen from."""

from __future__ import annotations

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Alternative

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
EQUAL = 5e-4
"""Share of a step that nobody minds."""


def choice_lines(plan: Plan) -> list[str]:
    """Returns lines that say how long a step takes, what came next, and what else there is."""
    if plan.step_seconds is None:
        return []
    lines = [f"A step takes {_seconds(plan.step_seconds)}, simulated."]
    if plan.next_best is not None and plan.next_best != plan.advice:  # which has its own line
        lines[0] += f" Next best: {_options(plan, plan.next_best)}, {_trade(plan, plan.next_best)}."
    if plan.advice is not None:
        lines.append(f"Advice: {_options(plan, plan.advice)}: {_trade(plan, plan.advice)}.")
    return lines


def _options(plan: Plan, other: Alternative) -> str:
    """The options that another plan has otherwise."""
    names = ("num_stages", "num_replicas", "num_micro_batches", "schedule", "balance")
    found = [(name, getattr(other, name)) for name in names]
    return ", ".join(f"{name}={value!r}" for name, value in found if value != getattr(plan, name))


def _trade(plan: Plan, other: Alternative) -> str:
    """How much longer another plan's step is, and what its largest stage needs more."""
    share = other.step_seconds / (plan.step_seconds or 1.0) - 1
    more = other.memory_bytes - max(stage.memory_bytes for stage in plan.stages)
    time = f"{100 * abs(share):.2g} % {'longer' if share > 0 else 'shorter'} step"
    if abs(share) < EQUAL:
        time = "as long a step"
    return f"{time}, {'-' if more < 0 else '+'}{format_bytes(abs(more))}" if more else time


def _seconds(value: float) -> str:
    unit, scale = next((pair for pair in UNITS if value >= pair[1]), UNITS[-1])
    return f"{value / scale:.3g} {unit}"
