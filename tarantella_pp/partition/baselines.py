"""The rules by which other pipeline libraries cut a model, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tarantella_pp.partition.solvers.contraction import strong_owners
from tarantella_pp.partition.solvers.problem.certificate import Certificate, Solution
from tarantella_pp.partition.solvers.problem.digraph import topological
from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    IntArray,
    Problem,
    weighted_counts,
)


def equal_layers(problem: Problem) -> IntArray:
    """Gives every stage the same number of layers, along the order of the graph."""
    return _by_sequence(problem, np.ones(problem.num_nodes), minimal_maximum)


def parameter_balance(problem: Problem) -> IntArray:
    """Balances the static memory along the order of the graph.

    DeepSpeed's `partition_method="parameters"`: the smallest largest stage of a sequence.
    """
    weights = problem.static_memory
    if not weights.any():
        weights = problem.activation_memory
    return _by_sequence(problem, weights, minimal_maximum)


def block_partition(problem: Problem) -> IntArray:
    """Balances the objective's own node costs along the order of the graph.

    torchgpipe's `balance_by_time` and `balance_by_size`: the block partition of Bárány and
    Grinberg, "Block partitions of sequences", Israel Journal of Mathematics 206 (2015), whose
    blocks differ by no more than the largest item.
    """
    memory = problem.static_memory + problem.activation_memory
    weights = memory if problem.objective == "memory" else problem.work
    return _by_sequence(problem, weights, barany_grinberg)


#: The rules by the name that a comparison prints.
RULES: dict[str, Callable[[Problem], IntArray]] = {
    "equal layers": equal_layers,
    "parameter balance": parameter_balance,
    "block partition": block_partition,
}


def _by_sequence(
    problem: Problem, weights: FloatArray, cut: Callable[[FloatArray, int], list[int]]
) -> IntArray:
    """Cuts the topological order; nodes that must share a stage are one item of it."""
    n = problem.num_nodes
    edges = problem.precedence.tolist()
    together = [g for g, apart in zip(problem.groups, problem.apart, strict=True) if not apart]
    owner = strong_owners(n, [(before, after) for before, after in edges], together)
    preds: list[set[int]] = [set() for _ in range(n)]
    succs: list[set[int]] = [set() for _ in range(n)]
    for before, after in owner[problem.precedence].tolist():
        if before != after:
            preds[after].add(before)
            succs[before].add(after)
    order = topological([sorted(p) for p in preds], [sorted(s) for s in succs])
    items = [node for node in order if owner[node] == node]
    sums = weighted_counts(owner, weights, n)[items]
    stage_of = np.zeros(n, np.int64)
    stages = min(problem.num_stages, len(items))
    for stage, begin in enumerate(cut(sums, stages)):
        stage_of[items[begin:]] = stage
    assignment: IntArray = stage_of[owner]
    return assignment


def minimal_maximum(weights: FloatArray, parts: int) -> list[int]:
    """Cuts a sequence so that its heaviest part is as light as can be."""
    low, high = float(weights.max(initial=0.0)), float(weights.sum())
    for _ in range(60):
        middle = (low + high) / 2
        if len(_fill(weights, parts, middle)) <= parts:
            high = middle
        else:
            low = middle
    return _fill(weights, parts, high * (1 + 1e-12))


def _fill(weights: FloatArray, parts: int, capacity: float) -> list[int]:
    """Fills parts in order, each while it holds; the last items each get a part if need be."""
    begins, load = [0], 0.0
    for index, weight in enumerate(weights.tolist()):
        left = len(weights) - index
        full = load + weight > capacity or left == parts - len(begins)
        if index > begins[-1] and full:
            begins.append(index)
            load = 0.0
        load += weight
    return begins


def barany_grinberg(weights: FloatArray, parts: int) -> list[int]:
    """Cuts a sequence into blocks that differ by no more than its largest item.

    Starting from even counts, the heaviest block hands an item at its border towards the
    lightest one, as long as the block that receives it stays lighter.
    """
    n = len(weights)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    bounds = [n * part // parts for part in range(parts + 1)]
    for _ in range(4 * n * parts):
        moved = False
        loads = [sums[bounds[i + 1]] - sums[bounds[i]] for i in range(parts)]
        for heavy in sorted(range(parts), key=lambda i: -loads[i]):
            if bounds[heavy + 1] - bounds[heavy] < 2:
                continue
            right = heavy + 1 < parts
            last = weights[bounds[heavy + 1] - 1]
            first = weights[bounds[heavy]]
            if right and loads[heavy + 1] + last < loads[heavy]:
                bounds[heavy + 1] -= 1
                moved = True
            elif heavy > 0 and loads[heavy - 1] + first < loads[heavy]:
                bounds[heavy] += 1
                moved = True
            if moved:
                break
        if not moved:
            break
    return bounds[:-1]


OURS = "tarantella"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the largest stage is under each rule, for one objective.

    Attributes:
        objective: What is measured: `"memory"`, `"time"`, `"flops"` or `"load"`.
        certificate: How good our plan is known to be.
        values: The largest stage under each rule, ours first.
    """

    objective: str
    certificate: Certificate
    values: dict[str, float]

    def ratio(self, rule: str) -> float | None:
        """Returns how many times larger the largest stage is than in our plan."""
        ours = self.values[OURS]
        return self.values[rule] / ours if ours else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, numbers and strings, ready for JSON."""
        return {
            "optimal": self.certificate.optimal,
            "lower_bound": self.certificate.lower_bound,
            "rules": {
                rule: {"value": value, "ratio": self.ratio(rule)}
                for rule, value in self.values.items()
            },
        }


def compare(
    problem: Problem,
    solution: Solution,
    value: Callable[[Sequence[int]], float],
    objective: str | None = None,
    given: Sequence[int] | None = None,
) -> Comparison:
    """Prices our plan and those of the rules of other libraries."""
    values = {OURS: value(solution.assignment)}
    values |= {name: value(tuple(rule(problem).tolist())) for name, rule in RULES.items()}
    if given is not None:
        values["given"] = value(given)
    return Comparison(objective or problem.objective, solution.certificate, values)
