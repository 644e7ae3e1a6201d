"""Exact balance without communication: the assembly-line DP over ideals."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tarantella_pp.partition.solvers.exact.ideals import Lattice
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray

#: Below this mean number of steps per level, lists beat array operations.
NARROW = 60
_SLACK = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class BalanceResult:
    """What the search proved: the best stages found (None: none below the start), and a bound."""

    stages: IntArray | None
    lower_bound: float


def solve_balance(
    instance: Instance, lattice: Lattice, lower: float, upper: float, deadline: float
) -> BalanceResult:
    """Finds the smallest bottleneck of an additive objective over all orders.

    For a capacity C, the value of an ideal is (closed stages, load of the open stage), smallest
    first: fewer closed stages always win, since a stage may be closed early, so one value per
    ideal decides whether C can be met (Held, Karp and Shareshian, "Assembly-line balancing -
    dynamic programming with precedence constraints", Operations Research 11, 1963). A failed
    C proves that the optimum is at least the smallest sum that was too large; C is bisected
    until bound and value meet. Costs may differ from stage to stage.
    """
    probe = _Probe(instance, lattice)
    best: IntArray | None = None
    first = True
    while lower * (1 + 1e-10) < upper and time.thread_time() < deadline:
        # The bound is often met: try it first, then halve the interval.
        capacity = lower * _SLACK if first else max(lower * _SLACK, (lower + upper) / 2)
        first = False
        stages, bound = probe.run(capacity)
        if stages is None:
            lower = max(lower * _SLACK, bound)
        else:
            best = stages
            upper = min(upper, float(instance.objective.stage_costs(stages).max()))
            if upper > capacity * (1 + 1e-9):
                break
    return BalanceResult(best, min(lower, upper))


class _Probe:
    """The DP for one capacity at a time; what does not depend on the capacity is kept."""

    def __init__(self, instance: Instance, lattice: Lattice) -> None:
        self._costs = instance.objective.node_costs()
        self._cap = instance.objective.cap
        self._lattice = lattice
        self._n = instance.num_nodes
        level = lattice.size
        order = np.argsort(level[lattice.target], kind="stable")
        self._source = lattice.source[order]
        self._target = lattice.target[order]
        self._node = lattice.node[order]
        self._levels = np.searchsorted(level[self._target], np.arange(1, self._n + 2))
        self._narrow = len(order) < NARROW * self._n

    def run(self, capacity: float) -> tuple[IntArray | None, float]:
        """Returns stages that keep within the capacity, or None and the next one to try."""
        cap = np.minimum(capacity, self._cap)
        base = 2.0 ** np.ceil(np.log2(max(capacity, 1e-300)) + 1)
        jump = self._jumps(cap, base)
        if self._narrow:
            key = self._narrow_pass(cap, base, jump)
        else:
            key = self._wide_pass(cap, base, jump)
        if np.isfinite(key[-1]):
            return self._stages(key, cap, base, jump), capacity
        return None, self._next_capacity(key, capacity, base)

    def _jumps(self, cap: FloatArray, base: float) -> FloatArray:
        """Returns the key reached when a node opens the next stage that it fits, `(S, n)`."""
        S = len(cap)
        jump = np.full((S, self._n), np.inf)
        for stage in range(S - 2, -1, -1):
            cost = self._costs[stage + 1]
            fits = cost <= cap[stage + 1]
            jump[stage] = np.where(fits, (stage + 1) * base + cost, jump[stage + 1])
        return jump

    def _wide_pass(self, cap: FloatArray, base: float, jump: FloatArray) -> FloatArray:
        key = np.full(self._lattice.count, np.inf)
        key[0] = 0.0
        for begin, end in zip(self._levels[:-1], self._levels[1:], strict=True):
            targets = self._target[begin:end]
            reached = self._extend(key, slice(begin, end), cap, base, jump)
            starts = np.flatnonzero(np.diff(targets, prepend=-1))
            key[targets[starts]] = np.minimum.reduceat(reached, starts)
        return key

    def _extend(
        self, key: FloatArray, steps: slice, cap: FloatArray, base: float, jump: FloatArray
    ) -> FloatArray:
        before, node = key[self._source[steps]], self._node[steps]
        known = np.isfinite(before)
        before = np.where(known, before, 0.0)
        stage = (before // base).astype(np.int64)
        load = before - stage * base + self._costs[stage, node]
        after = np.where(load <= cap[stage], stage * base + load, jump[stage, node])
        return np.where(known, after, np.inf)

    def _narrow_pass(self, cap: FloatArray, base: float, jump: FloatArray) -> FloatArray:
        infinity = float("inf")
        keys = [infinity] * self._lattice.count
        keys[0] = 0.0
        costs, caps, jumps = self._costs.tolist(), cap.tolist(), jump.tolist()
        steps = zip(self._source.tolist(), self._target.tolist(), self._node.tolist(), strict=True)
        for source, target, node in steps:
            before = keys[source]
            if before == infinity:
                continue
            stage = int(before // base)
            load = before - stage * base + costs[stage][node]
            after = stage * base + load if load <= caps[stage] else jumps[stage][node]
            if after < keys[target]:
                keys[target] = after
        return np.array(keys)

    def _next_capacity(self, key: FloatArray, capacity: float, base: float) -> float:
        """Returns the smallest sum that was too large: below it, the DP would run the same."""
        known = np.isfinite(key[self._source])
        before, node = key[self._source[known]], self._node[known]
        stage = (before // base).astype(np.int64)
        sums = before - stage * base + self._costs[stage, node]
        single = self._costs[self._costs > capacity]
        above = np.concatenate([sums[sums > capacity], single])
        return float(above.min()) if len(above) else float("inf")

    def _stages(self, key: FloatArray, cap: FloatArray, base: float, jump: FloatArray) -> IntArray:
        """Walks back from the full ideal along steps that gave the best keys."""
        starts = np.searchsorted(self._lattice.target, np.arange(self._lattice.count + 1))
        source, node = self._lattice.source, self._lattice.node
        stages = np.zeros(self._n, np.int64)
        at = self._lattice.count - 1
        while at > 0:
            for step in range(starts[at], starts[at + 1]):
                before = key[source[step]]
                if not np.isfinite(before):
                    continue
                stage = int(before // base)
                load = before - stage * base + self._costs[stage, node[step]]
                fits = load <= cap[stage]
                after = stage * base + load if fits else jump[stage, node[step]]
                if after == key[at]:
                    stages[node[step]] = int(after // base)
                    at = int(source[step])
                    break
        return stages
