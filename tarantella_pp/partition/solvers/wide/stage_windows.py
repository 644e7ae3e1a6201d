"""Which stages a node may lie on in any plan below a capacity, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import Instance, Resource
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray

#: Nodes up to which all pairs of ancestors are kept.
MAX_NODES = 4000


@dataclass(frozen=True, eq=False, slots=True)
class Closure:
    """What must come no later, and no earlier, than each node; itself included.

    Attributes:
        reach: Whether each node comes no later than each other one, shape `(n, n)`.
        resource: The quantity summed.
        fixed_before: Its fixed part in all that comes no later, shape `(n,)`.
        held_before: Its per-micro-batch part in the same.
        fixed_after: Its fixed part in all that comes no earlier.
        held_after: Its per-micro-batch part in the same.
    """

    reach: NDArray[np.bool_]
    resource: Resource
    fixed_before: FloatArray
    held_before: FloatArray
    fixed_after: FloatArray
    held_after: FloatArray

    @classmethod
    def of(cls, instance: Instance) -> Closure:
        """Sums the objective over all ancestors and descendants of each node."""
        n, resource = instance.num_nodes, instance.objective
        reach = np.eye(n, dtype=bool)
        for node in range(n - 1, -1, -1):
            for after in instance.succs[node]:
                reach[node] |= reach[after]
        fixed, held = resource.fixed, resource.held
        return cls(reach, resource, fixed @ reach, held @ reach, reach @ fixed, reach @ held)

    @property
    def before(self) -> FloatArray:
        """Least work that must come no later than each node."""
        least: FloatArray = self.fixed_before + self.resource.factor.min() * self.held_before
        return least

    @property
    def after(self) -> FloatArray:
        """Least work that must come no earlier than each node."""
        least: FloatArray = self.fixed_after + self.resource.factor.min() * self.held_after
        return least

    def stages(self, capacity: float) -> tuple[IntArray, IntArray]:
        """Returns the first and the last stage of each node in plans within a capacity."""
        S, fits = len(self.resource.scale), self.resource.fits
        caps = np.minimum(self.resource.cap, capacity)
        first: IntArray = np.zeros(len(self.fixed_before), np.int64)
        last: IntArray = np.full(len(self.fixed_before), S - 1, np.int64)
        for stage in range(S):
            few = slice(0, stage + 1)
            first[~fits(few, caps, self.fixed_before, self.held_before)] = stage + 1
            few = slice(S - 1 - stage, S)
            last[~fits(few, caps, self.fixed_after, self.held_after)] = S - 2 - stage
        return first, last


def window_bound(closure: Closure, lower: float, upper: float) -> float:
    """Bounds the bottleneck by the stages that ancestors and descendants fill on their own.

    A node whose ancestors need e stages and whose descendants need l more than S - e of them
    cannot be placed (the earliest and latest stations of assembly-line balancing, Saltzman and
    Baybars 1987).
    """
    for _ in range(60):
        if upper - lower <= 1e-12 * upper:
            break
        middle = (lower + upper) / 2
        first, last = closure.stages(middle)
        if (first > last).any():
            lower = middle
        else:
            upper = middle
    return lower
