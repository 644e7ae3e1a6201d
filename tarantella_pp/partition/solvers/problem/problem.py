"""The partition problem in numbers: what the solvers work on, free of Keras and TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.solvers.problem import problem_validation
from tarantella_pp.partition.solvers.problem.certificate import TOLERANCE

Objective = Literal["memory", "time", "flops", "load"]
Tied = Literal["together", "free"]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorCost:
    """A value that travels between stages when its nodes do not all share one.

    Attributes:
        producer: Node that makes it, or None for an input of the model.
        nodes: Every node that touches it, the producer among them.
        comm: Time that each stage pays which touches the tensor without holding all its nodes.
        bytes: Size on the wire, used to break ties (cut bytes).
        receive_bytes: Bytes per micro-batch in flight that a stage keeps when it receives the
            tensor from an earlier stage.
    """

    producer: int | None
    nodes: tuple[int, ...]
    comm: float = 0.0
    bytes: float = 0.0
    receive_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan costs, stage by stage.

    Attributes:
        value: The objective: the largest of `stage_values`.
        stage_values: Value of each stage in the objective's unit.
        stage_memory: Bytes of each stage.
        stage_work: Work (time or FLOPs) of each stage.
        stage_comm: Communication time of each stage.
        cut_comm: Sum over cut tensors of comm x (touching stages - 1).
        cut_bytes: Sum over cut tensors of bytes x (touching stages - 1).
    """

    value: float
    stage_values: FloatArray
    stage_memory: FloatArray
    stage_work: FloatArray
    stage_comm: FloatArray
    cut_comm: float
    cut_bytes: float


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One partition problem: nodes, precedence, tensors, stages, objective and limits.

    The memory of stage s is, in bytes,
    `sum(static_memory) + in_flight[s] * (sum(activation_memory) + sum(receive_bytes))`
    over the stage's nodes and over the tensors it receives from earlier stages.

    Attributes:
        num_stages: Stages of the pipeline; at most that many are used (see `exactly`).
        objective: What the largest stage is measured in. "memory": bytes; "time" and "flops":
            sum of work; "load": work plus communication.
        work: Time or FLOPs of each node, shape `(n,)`.
        static_memory: Bytes of each node that do not depend on micro-batches, shape `(n,)`.
        activation_memory: Bytes of each node per micro-batch in flight, shape `(n,)`.
        tensors: The values that travel.
        edges: Precedence pairs `(before, after)`, shape `(m, 2)`. None: from the tensors,
            producer before each other node.
        in_flight: Micro-batches held on each stage; None: one on each.
        groups: Nodes that share weights.
        tied: For all groups, or one for each. "together": the nodes of a group share a stage.
            "free": they are kept together only where that costs nothing; otherwise the group's
            first node (in topological order) holds the weights, no other node of the group runs
            on an earlier stage, and each later stage with a node of the group pays `group_bytes`
            of memory.
        group_bytes: Bytes of each group's weights; empty: 0 each.
        memory_limit: Bytes that a stage may hold, one number or one per stage; None: no limit.
        exactly: Whether each of the stages must have at least one node.
        alike: Share of the best value by which another plan's may be larger and count as equal, so
            that the one of them is taken that cuts less.
    """

    num_stages: int
    objective: Objective
    work: FloatArray
    static_memory: FloatArray
    activation_memory: FloatArray
    tensors: tuple[TensorCost, ...] = ()
    edges: IntArray | None = None
    in_flight: Sequence[int] | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    tied: Tied | Sequence[Tied] = "together"
    group_bytes: Sequence[float] = ()
    memory_limit: float | Sequence[float] | None = None
    exactly: bool = False
    alike: float = TOLERANCE / 4
    apart: tuple[bool, ...] = field(init=False)
    precedence: IntArray = field(init=False)
    flight: FloatArray = field(init=False)
    limits: FloatArray | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("work", "static_memory", "activation_memory"):
            checked = problem_validation.costs(name, getattr(self, name), len(self.work))
            object.__setattr__(self, name, checked)
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        problem_validation.check_options(self, get_args(Objective))
        object.__setattr__(self, "apart", problem_validation.apart(self, get_args(Tied)))
        problem_validation.check_tensors(self)
        object.__setattr__(self, "flight", problem_validation.in_flight(self))
        object.__setattr__(self, "limits", problem_validation.limits(self))
        object.__setattr__(self, "precedence", problem_validation.precedence(self))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.work)

    def evaluate(self, assignment: Sequence[int] | IntArray) -> Evaluation:
        """Prices a plan."""
        stages = np.asarray(assignment, dtype=np.int64)
        if stages.shape != (self.num_nodes,):
            raise PlanError(
                f"An assignment names one stage for each of the {self.num_nodes} nodes. "
                f"Received: shape {stages.shape}"
            )
        S = self.num_stages
        if len(stages) and (stages.min() < 0 or stages.max() >= S):
            raise PlanError(f"A stage lies outside 0..{S - 1}. Received: {stages.tolist()[:20]}")
        work = weighted_counts(stages, self.work, S)
        static = weighted_counts(stages, self.static_memory, S)
        held = weighted_counts(stages, self.activation_memory, S)
        comm, cut_comm, cut_bytes = np.zeros(S), 0.0, 0.0
        for tensor in self.tensors:
            touching = {int(stages[node]) for node in tensor.nodes}
            if len(touching) > 1:
                comm[list(touching)] += tensor.comm
                cut_comm += tensor.comm * (len(touching) - 1)
                cut_bytes += tensor.bytes * (len(touching) - 1)
                if tensor.receive_bytes and tensor.producer is not None:
                    made = stages[tensor.producer]
                    held[[s for s in touching if s > made]] += tensor.receive_bytes
        self._price_groups(stages, static)
        memory = static + self.flight * held
        values = {"memory": memory, "load": work + comm}.get(self.objective, work)
        value = float(values.max()) if S else 0.0
        return Evaluation(value, values, memory, work, comm, cut_comm, cut_bytes)

    def _price_groups(self, stages: IntArray, static: FloatArray) -> None:
        for index, group in enumerate(self.groups):
            touching = sorted({int(stages[node]) for node in group})
            if self.apart[index] and len(touching) > 1:
                static[touching[1:]] += self.group_bytes[index] if self.group_bytes else 0.0

    def violation(self, assignment: Sequence[int] | IntArray) -> str | None:
        """Says what is wrong with a plan, if anything."""
        stages = np.asarray(assignment, dtype=np.int64)
        back = np.flatnonzero(stages[self.precedence[:, 0]] > stages[self.precedence[:, 1]])
        if len(back):
            before, after = self.precedence[back[0]].tolist()
            return f"node {after} on stage {stages[after]} needs node {before}, a later stage's"
        for group, apart in zip(self.groups, self.apart, strict=True):
            if not apart and len({int(stages[node]) for node in group}) > 1:
                return f"nodes {list(group)} share weights and lie on several stages"
        if self.exactly and len(np.unique(stages)) < self.num_stages:
            return f"a stage is empty, and exactly {self.num_stages} are asked for"
        if self.limits is not None:
            over = self.evaluate(stages).stage_memory - self.limits * (1 + 1e-9)
            if (over > 0).any():
                return f"stage {int(over.argmax())} is above its memory limit"
        return None


def weighted_counts(index: IntArray, weights: FloatArray, size: int) -> FloatArray:
    """Sums weights by index: entry i of the result is the sum of the weights of index i."""
    counts: FloatArray = np.bincount(index, weights, size).astype(np.float64, copy=False)
    return counts
