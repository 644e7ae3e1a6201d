"""The figures at the head of the page."""

from __future__ import annotations

from tarantella_pp.partition.pictures.bars import StepBars
from tarantella_pp.partition.pictures.markup import Markup, tag
from tarantella_pp.partition.pictures.words import count, flops, percent, seconds
from tarantella_pp.partition.plan import Plan
from tarantella_pp.partition.sizes import format_bytes


def tiles(plan: Plan, timeline: StepBars | None) -> Markup:
    """Returns what one looks for first.

    Args:
        plan: The plan.
        timeline: The step that is drawn; `None` for none.
    """
    shown: list[tuple[str, str, str]] = [
        ("Largest stage", *_largest(plan)),
        (f"Balanced by {plan.balance}", *_verdict(plan)),
        ("Bubble", *_bubble(plan, timeline)),
        ("Batch", *_batch(plan)),
        ("Ranks", *_ranks(plan, timeline)),
        ("Sent forward", *_sent(plan)),
    ]
    return tag("dl", *(_tile(*tile) for tile in shown), class_="tiles")


def _tile(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", note)))


def _largest(plan: Plan) -> tuple[str, str]:
    sizes = [stage.memory_bytes for stage in plan.stages]
    if plan.limits is None:
        return format_bytes(max(sizes)), "no limit"
    # Of unequal devices, the one that is fullest.
    pairs = zip(sizes, plan.limits, strict=True)
    size, limit = max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))
    note = f"{percent(size, limit)} of {format_bytes(limit)}"
    over = size > limit
    return (tag("span", format_bytes(size), class_="over") if over else format_bytes(size)), note


def _verdict(plan: Plan) -> tuple[str, str]:
    """How good the plan is known to be."""
    proof = plan.certificate
    value, bound = (
        f"{flops(v)} per sample" if plan.balance == "flops" else format_bytes(v)
        for v in (proof.value, proof.lower_bound)
    )
    if proof.optimal:
        return "optimal", f"{value}, proven by {proof.method} in {seconds(proof.seconds)}"
    if proof.gap is None:
        return value, f"no lower bound ({proof.method})"
    return f"gap ≤ {100 * proof.gap:.2g} %", f"{value}, no plan is below {bound} ({proof.method})"


def _bubble(plan: Plan, timeline: StepBars | None) -> tuple[str, str]:
    found = plan.bubble if timeline is None else timeline.bubble
    return ("-", "not simulated") if found is None else (percent(found), "simulated")


def _batch(plan: Plan) -> tuple[str, str]:
    parts = count(plan.num_micro_batches, "micro-batch", "micro-batches")
    return f"{plan.batch_size:,}", f"{parts} of {count(plan.micro_batch_size, 'sample')}"


def _ranks(plan: Plan, timeline: StepBars | None) -> tuple[str, str]:
    replicas = count(plan.num_replicas, "replica")
    own = plan.num_ranks if timeline is None else len(timeline.rank_names)
    return f"{own * plan.num_replicas:,}", f"{count(plan.num_stages, 'stage')} × {replicas}"


def _sent(plan: Plan) -> tuple[str, str]:
    size = sum((cut.bytes + cut.mask_bytes) * len(cut.targets) for cut in plan.cuts)
    return format_bytes(size), f"{count(len(plan.cuts), 'tensor')}, per micro-batch"
