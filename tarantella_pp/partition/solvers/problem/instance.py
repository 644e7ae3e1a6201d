"""A problem made ready to solve: fused nodes in topological order, costs as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    IntArray,
    weighted_counts,
)

#: Producer of a tensor that no stage receives: it enters from outside, or only costs its touch.
INPUT = -1
#: Producer of a tensor that every stage receives which touches it, but the first.
ANY = -2


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """What tensors add to a stage's cost; all pins are node numbers of the instance.

    A stage pays `touch` when it holds some but not all pins. It pays `receive` (once) and
    `receive_held` (per micro-batch in flight) when it holds a pin and the producer came earlier.
    """

    pins: tuple[tuple[int, ...], ...] = ()
    producer: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    touch: FloatArray = field(default_factory=lambda: np.zeros(0))
    receive: FloatArray = field(default_factory=lambda: np.zeros(0))
    receive_held: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self.pins)

    def flat(self) -> tuple[IntArray, IntArray]:
        """Returns the pins of all tensors one after another, and where those of each begin."""
        pins: IntArray = np.array([pin for one in self.pins for pin in one], dtype=np.int64)
        sizes: IntArray = np.array([len(one) for one in self.pins], dtype=np.int64)
        return pins, np.cumsum(sizes) - sizes

    @property
    def has_touch(self) -> bool:
        """Whether any tensor costs its touching stages."""
        return bool(self.touch.any())

    @property
    def has_receive(self) -> bool:
        """Whether any tensor costs its receiving stages."""
        return bool(self.receive.any() or self.receive_held.any())


@dataclass(frozen=True, eq=False, slots=True)
class Resource:
    """One additive quantity with tensor terms: the objective, or the limited memory.

    The cost of a stage is
    `scale[s] * (fixed + receive + touch + factor[s] * (held + receive_held))`, sums over the stage.

    Attributes:
        fixed: Cost of each node, whatever the schedule.
        held: Cost of each node for every micro-batch that its stage holds.
        factor: Number of micro-batches that each stage holds.
        scale: By how much each stage is dearer than others.
        cap: Bound of each stage; infinite if it is free.
        terms: Costs of tensors.
    """

    fixed: FloatArray
    held: FloatArray
    factor: FloatArray
    scale: FloatArray
    cap: FloatArray
    terms: Terms

    @property
    def uniform(self) -> bool:
        """Whether a set of nodes costs the same on every stage."""
        same = (self.scale == self.scale[0]).all() and (self.cap == self.cap[0]).all()
        held = self.held.any() or self.terms.receive_held.any()
        return bool(same and (not held or (self.factor == self.factor[0]).all()))

    def fits(
        self, stages: slice, caps: FloatArray, fixed: FloatArray, held: FloatArray
    ) -> NDArray[np.bool_]:
        """Tells what may fit in some stages together, as far as sums can tell.

        Stages that hold a_s and b_s of it have room for a_s + f_s b_s each. Added up, that is at
        least `a + f_min b`; weighted by 1 / f_s, so that b counts in full, at least
        `a / f_max + b`.
        """
        room, factor = caps[stages] / self.scale[stages], self.factor[stages]
        slack = 1e-9 * room.max(initial=0.0)
        fits: NDArray[np.bool_] = fixed + factor.min(initial=np.inf) * held <= room.sum() + slack
        if len(factor) and factor.min() > 0:
            most = factor.max()
            fits &= fixed / most + held <= (room / factor).sum() + slack / most
        return fits

    def price(self, stage: int, fixed: FloatArray, held: FloatArray) -> FloatArray:
        """Returns the cost on a stage of its fixed and its per-micro-batch part."""
        cost: FloatArray = self.scale[stage] * (fixed + self.factor[stage] * held)
        return cost

    def node_costs(self) -> FloatArray:
        """Returns the cost of each node on each stage, shape `(S, n)`."""
        costs: FloatArray = self.scale[:, None] * (
            self.fixed[None, :] + self.factor[:, None] * self.held[None, :]
        )
        return costs

    def stage_costs(self, stages: IntArray) -> FloatArray:
        """Returns the cost of each stage under an assignment, shape `(S,)`."""
        S = len(self.scale)
        fixed = weighted_counts(stages, self.fixed, S)
        held = weighted_counts(stages, self.held, S)
        terms = self.terms
        for t, pins in enumerate(terms.pins):
            touching = {int(stages[pin]) for pin in pins}
            if len(touching) > 1:
                fixed[list(touching)] += terms.touch[t]
                producer = terms.producer[t]
                if producer != INPUT:
                    made = min(touching) if producer == ANY else stages[producer]
                    later = [stage for stage in touching if stage > made]
                    fixed[later] += terms.receive[t]
                    held[later] += terms.receive_held[t]
        return self.scale * (fixed + self.factor * held)


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """A reduced problem; nodes are numbered in a topological order.

    Attributes:
        num_stages: Stages that may be used.
        preds: Predecessors of each node.
        succs: Successors of each node.
        resources: The objective first, then the limited memory if there is a limit.
        strict: Whether every stage must hold at least one node.
        place: Node of this instance that each original node belongs to, or -1: a node without
            cost, left out, that goes to the stage of its latest predecessor.
        cut: Comm and bytes of tensors, to break ties: pins, comm, bytes.
    """

    num_stages: int
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    resources: tuple[Resource, ...]
    strict: bool
    place: IntArray

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the reduced problem."""
        return len(self.preds)

    @property
    def objective(self) -> Resource:
        """The quantity whose largest stage is minimised."""
        return self.resources[0]

    @property
    def additive(self) -> bool:
        """Whether the objective is a plain sum over nodes and nothing else is limited."""
        return self.settled and not self.objective.terms.has_receive

    @property
    def settled(self) -> bool:
        """Whether all that stages cost but for what they receive is a plain sum over nodes."""
        return len(self.resources) == 1 and not self.objective.terms.has_touch

    def value(self, stages: IntArray) -> float:
        """Returns the bottleneck of an assignment, infinite where it breaks a limit."""
        for resource in self.resources:
            costs = resource.stage_costs(stages)
            if (costs > resource.cap * (1 + 1e-9)).any():
                return float("inf")
        if self.strict and len(np.unique(stages)) < self.num_stages:
            return float("inf")
        return float(self.objective.stage_costs(stages).max())

    def with_objective(self, objective: Resource) -> Instance:
        """Returns the same nodes under another objective, without limits."""
        return replace(self, resources=(objective,))
