"""What a plan is made of, and whether that fits together; `plan.Plan` shows it, too."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, NodeWork
from tarantella_pp.partition.plan.plan_parts import (
    Alternative,
    Certificate,
    CutEdge,
    OutputUse,
    PlanConfig,
    StagePlan,
    Tie,
)
from tarantella_pp.schedule import Schedule, ScheduleSpec


class PlanData(
    PlanConfig,
    JsonRecord,
    frozen=True,
    kw_only=True,
    tag_field="format",
    tag="tarantella_pp.plan",
    rename={"schedule_text": "program"},  # as in files of the first version
):
    """The record of a plan, without its displays, which take it; see `Plan`."""

    noun: ClassVar[str] = "plan"

    model: str
    optimizer: str
    fingerprint: str
    node_names: tuple[str, ...]
    assignment: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    cuts: tuple[CutEdge, ...]
    certificate: Certificate
    ties: tuple[Tie, ...] = ()
    bubble: float | None = None
    assumed_size: int | None = None
    estimated: tuple[str, ...] = ()
    schedule_text: str | None = None
    fallbacks: tuple[str, ...] = ()
    outputs: OutputUse | None = None
    machine: HardwareSpec | None = None
    step_seconds: float | None = None
    next_best: Alternative | None = None
    advice: Alternative | None = None
    measured: tuple[Any, ...] = ()
    work: tuple[NodeWork, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together."""
        for problem in problems(self):
            raise PlanError(f"This is no valid plan: {problem}")

    @property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of stages, source first, that exchange messages."""
        return {(cut.source, target) for cut in self.cuts for target in cut.targets}

    @property
    def gradient_links(self) -> set[tuple[int, int]]:
        """Those of `links` over which gradients come back."""
        with_gradient = (cut for cut in self.cuts if cut.has_gradient)
        return {(cut.source, target) for cut in with_gradient for target in cut.targets}

    def sent_bytes(self, source: int | None = None) -> int:
        """Returns the bytes that one stage, or all, send forward for one micro-batch."""
        return sum(
            (self.sent(cut) + cut.mask_bytes) * len(cut.targets)
            for cut in self.cuts
            if source in {None, cut.source}
        )

    def rank_bytes(self, num_ranks: int) -> list[int]:
        """Returns the planned bytes of each rank of a pipeline."""
        found = [0] * num_ranks
        placement = self.schedule_spec(num_ranks).placement
        for rank, stage in zip(placement, self.stages, strict=True):
            found[rank] += stage.memory_bytes
        return found

    def schedule_spec(self, num_ranks: int | None = None) -> ScheduleSpec:
        """Returns the schedule of a pipeline, by default for the ranks it was planned for."""
        # A schedule may put several stages on a rank only where the plan was made for that.
        if num_ranks is None and self.ranks:
            num_ranks = self.num_ranks
        if self.schedule_text is None:
            return ScheduleSpec.of(self.schedule, self.num_stages, num_ranks)
        custom = Schedule.from_text(self.schedule_text)
        return ScheduleSpec.of_custom(custom, self.num_stages, num_ranks)

    def check(self, graph: LayerGraph) -> None:
        """Raises a `PlanError` that names what differs, if this is a plan of another model."""
        if self.fingerprint != graph.fingerprint():
            raise PlanError(f"This is a plan of another model: {difference(self, graph)}")
        # Such layers change state on each call, so their order must be the model's own.
        for group in graph.groups:
            stages = {self.assignment[node]: self.node_names[node] for node in sorted(group)}
            if len(stages) > 1:
                raise PlanError(
                    f"Nodes {list(stages.values())} share statistics or seeds, which change "
                    "whenever one of them runs, so they must be on one stage. The plan puts them "
                    f"on stages {list(stages)}."
                )
        for before, after in graph.digraph.edges:
            if self.assignment[before] > self.assignment[after]:
                raise PlanError(
                    f"Node '{self.node_names[after]}' on stage {self.assignment[after]} needs node "
                    f"'{self.node_names[before]}', which the plan puts on the later stage "
                    f"{self.assignment[before]}."
                )


def problems(plan: PlanData) -> Iterator[str]:
    """Finds what in a plan does not fit together."""
    yield from _wrong_numbers(plan)
    yield from _wrong_stages(plan)
    yield from _wrong_ranks(plan)
    yield from _wrong_recomputation(plan)
    yield from _wrong_cuts(plan)
    yield from _wrong_ties(plan)


def _wrong_numbers(plan: PlanData) -> Iterator[str]:
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
    # Far looser than the solver's own tolerance: files may have been written with fewer digits.
    if proof.optimal and not math.isclose(proof.value, proof.lower_bound, rel_tol=1e-6):
        yield (
            f"an optimal plan has the value of its bound. Received: value={proof.value}, "
            f"lower_bound={proof.lower_bound}"
        )


def _wrong_stages(plan: PlanData) -> Iterator[str]:
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
        # Not strict: unequal lengths are a problem of their own, reported above.
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


def _wrong_ranks(plan: PlanData) -> Iterator[str]:
    used = set(plan.ranks)
    if plan.ranks and (len(plan.ranks) != plan.num_stages or used != set(range(len(used)))):
        yield (
            "ranks must name one for each stage, or none, and leave none out. "
            f"Received: {list(plan.ranks)}"
        )


def _wrong_recomputation(plan: PlanData) -> Iterator[str]:
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


def _wrong_cuts(plan: PlanData) -> Iterator[str]:
    for i, cut in enumerate(plan.cuts):
        path = (cut.source, *cut.targets)
        rises = all(a < b for a, b in itertools.pairwise(path))
        if not (cut.targets and rises and path[0] >= 0 and path[-1] < plan.num_stages):
            yield (
                f"cuts[{i}] must run from a stage to later ones. Received: {cut.source} to "
                f"{list(cut.targets)}"
            )


def _wrong_ties(plan: PlanData) -> Iterator[str]:
    for i, tie in enumerate(plan.ties):
        rises = all(a < b for a, b in itertools.pairwise(tie.stages))
        if (
            len(tie.stages) < 2
            or not rises
            or not 0 <= tie.stages[0] <= tie.stages[-1] < plan.num_stages
        ):
            yield f"ties[{i}] must name two stages or more, ascending. Received: {tie.stages}"


def difference(plan: PlanData, graph: LayerGraph) -> str:
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
