"""Whether a plan fits together, and how it differs from one of another model."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tarantella_pp.partition.graph.layer_graph import LayerGraph

if TYPE_CHECKING:
    from tarantella_pp.partition.plan.plan import Plan


def problems(plan: Plan) -> Iterator[str]:
    """Finds what in a plan does not fit together."""
    yield from _wrong_numbers(plan)
    yield from _wrong_stages(plan)
    yield from _wrong_ranks(plan)
    yield from _wrong_recomputation(plan)
    yield from _wrong_cuts(plan)
    yield from _wrong_ties(plan)


def _wrong_numbers(plan: Plan) -> Iterator[str]:
    if plan.version != 1:
        yield f"its version must be 1. Received: version={plan.version}"
    counts = ("num_stages", "num_micro_batches", "num_replicas", "batch_size", "fusion_threshold")
    for name in counts:
        if getattr(plan, name) < 1:
            yield f"{name} must be at least 1. Received: {name}={getattr(plan, name)}"
    limits = plan.limits
    if limits is not None and (len(limits) != plan.num_stages or min(limits, default=0) < 1):
        yield (
            "memory_limit must be one positive number, or one for each stage. "
            f"Received: {plan.memory_limit}"
        )
    if not re.fullmatch("[0-9a-f]{64}", plan.fingerprint):
        yield f"its fingerprint must be 64 hexadecimal digits. Received: {plan.fingerprint[:80]!r}"
    proof = plan.certificate
    parts: list[tuple[str, Any]] = [("plan", plan), ("certificate", proof)]
    more = (("machine", plan.machine), ("next_best", plan.next_best), ("advice", plan.advice))
    parts += [(where, part) for where, part in more if part is not None]
    if plan.machine is not None and not plan.machine.flops_per_second:
        yield "machine.flops_per_second must be positive. Received: 0"
    parts += [(f"stages[{i}]", stage) for i, stage in enumerate(plan.stages)]
    parts += [(f"cuts[{i}]", cut) for i, cut in enumerate(plan.cuts)]
    parts += [(f"ties[{i}]", tie) for i, tie in enumerate(plan.ties)]
    for i, work in enumerate(plan.work):
        parts += [(f"work[{i}]", work), *((f"work[{i}].parts", one) for one in work.parts)]
    for where, part in parts:
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                yield f"{where}.{name} must be finite and not negative. Received: {value}"
    if proof.optimal and not math.isclose(proof.value, proof.lower_bound, rel_tol=1e-6):
        yield (
            f"an optimal plan has the value of its bound. Received: value={proof.value}, "
            f"lower_bound={proof.lower_bound}"
        )


def _wrong_stages(plan: Plan) -> Iterator[str]:
    if len(plan.stages) != plan.num_stages:
        yield f"it must have num_stages={plan.num_stages} stages. Received: {len(plan.stages)}"
    if len(plan.assignment) != len(plan.node_names):
        yield (
            f"assignment and node_names must be equally long. Received: {len(plan.assignment)} "
            f"and {len(plan.node_names)}"
        )
    if plan.work and len(plan.work) != len(plan.node_names):
        yield (
            f"work must name all {len(plan.node_names)} nodes, or of none. "
            f"Received: {len(plan.work)}"
        )
    for name, times in Counter(plan.node_names).most_common(1):
        if times > 1:
            yield f"node names must be unique. Received: {name!r} {times} times"
    for node, place in enumerate(plan.assignment):
        if not 0 <= place < len(plan.stages):
            yield f"node {node} must be on one of the stages. Received: stage {place}"
    for i, stage in enumerate(plan.stages):
        names = [n for n, s in zip(plan.node_names, plan.assignment, strict=False) if s == i]
        buckets = stage.bucket_bytes or ()
        if min(buckets, default=1) < 1 or sum(buckets) > stage.gradient_bytes:
            yield (
                f"stages[{i}] must have its {stage.gradient_bytes} bytes of gradients, or fewer, "
                f"in its buckets. Received: {list(buckets)}"
            )
        if not names or (stage.first, stage.last, stage.nodes) != (names[0], names[-1], len(names)):
            yield (
                f"stages[{i}] must name the first, the last and the number of its nodes. "
                f"Received: {stage.first!r}, {stage.last!r}, {stage.nodes}"
            )


def _wrong_ranks(plan: Plan) -> Iterator[str]:
    used = set(plan.ranks)
    if plan.ranks and (len(plan.ranks) != plan.num_stages or used != set(range(len(used)))):
        yield (
            "ranks must name one for each stage, or none, and leave none out. "
            f"Received: {list(plan.ranks)}"
        )


def _wrong_recomputation(plan: Plan) -> Iterator[str]:
    stages = set(plan.recompute)
    if list(plan.recompute) != sorted(stages) or not stages <= set(range(plan.num_stages)):
        yield f"recompute must name stages, ascending. Received: {list(plan.recompute)}"
    if list(plan.except_last) != sorted(stages & set(plan.except_last)):
        yield (
            "except_last must name stages of those that recompute, ascending. "
            f"Received: {list(plan.except_last)}"
        )
    for i, stage in enumerate(plan.stages):
        if stage.recomputed_bytes and i not in stages:
            yield f"stages[{i}] recomputes nothing. Received: {stage.recomputed_bytes} bytes of it"


def _wrong_cuts(plan: Plan) -> Iterator[str]:
    for i, cut in enumerate(plan.cuts):
        path = (cut.source, *cut.targets)
        rises = all(a < b for a, b in itertools.pairwise(path))
        if not (cut.targets and rises and path[0] >= 0 and path[-1] < plan.num_stages):
            yield (
                f"cuts[{i}] must run from a stage to later ones. Received: {cut.source} to "
                f"{list(cut.targets)}"
            )


def _wrong_ties(plan: Plan) -> Iterator[str]:
    for i, tie in enumerate(plan.ties):
        rises = all(a < b for a, b in itertools.pairwise(tie.stages))
        if (
            len(tie.stages) < 2
            or not rises
            or not 0 <= tie.stages[0] <= tie.stages[-1] < plan.num_stages
        ):
            yield f"ties[{i}] must name two stages or more, ascending. Received: {tie.stages}"


def difference(plan: Plan, graph: LayerGraph) -> str:
    """Says how a model differs from the one that a plan was made for.

    Names are compared without the numbers that Keras appends to them.
    """

    def stem(name: str) -> str:
        return re.sub(r"_\d+(?=[/:]|$)", "", name)

    if len(plan.node_names) != len(graph.nodes):
        return f"it has {len(plan.node_names)} nodes, and this model {len(graph.nodes)}."
    for i, (name, node) in enumerate(zip(plan.node_names, graph.nodes, strict=True)):
        if stem(name) != stem(node.name):
            return f"its node {i} is '{name}', and this model's is '{node.name}'."
    return "the nodes have the same names, but shapes, dtypes or connections differ."
