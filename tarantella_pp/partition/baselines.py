"""The rules by which other pipeline libraries cut a model, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tarantella_pp.partition.best_stages import Solution
from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Array, Blocks, summed
from tarantella_pp.partition.plan.plan_parts import Certificate

# Stage of each operation.
Assignment = tuple[int, ...]


def by_rules(blocks: Blocks, prices: Prices, state: Array) -> dict[str, Assignment]:
    """Cuts the order of a graph as other libraries do, by the name that a comparison prints.

    - Every stage gets the same number of layers.
    - DeepSpeed's `partition_method="parameters"`: the smallest largest stage by state, in bytes.
    - torchgpipe's `balance_by_time` and `balance_by_size`: the block partition of Bárány and
      Grinberg, "Block partitions of sequences", Israel Journal of Mathematics 206 (2015), whose
      blocks differ by no more than the largest item.
    """
    costs = prices.once + prices.each
    rules = {
        "equal layers": (np.ones(len(state)), minimal_maximum),
        "parameter balance": (state if state.any() else costs, minimal_maximum),
        "block partition": (costs, barany_grinberg),
    }
    found = {}
    for name, (weights, cut) in rules.items():
        stages = np.zeros(len(blocks), np.int64)
        items = summed(blocks.owner, weights)
        for stage, begin in enumerate(cut(items, min(prices.num_stages, len(blocks)))):
            stages[begin:] = stage
        found[name] = tuple(stages[blocks.owner].tolist())
    return found


def minimal_maximum(weights: Array, parts: int) -> list[int]:
    """Cuts a sequence so that its heaviest part is as light as can be."""
    low, high = float(weights.max(initial=0.0)), float(weights.sum())
    for _ in range(60):
        middle = (low + high) / 2
        if len(_fill(weights, parts, middle)) <= parts:
            high = middle
        else:
            low = middle
    return _fill(weights, parts, high * (1 + 1e-12))


def _fill(weights: Array, parts: int, capacity: float) -> list[int]:
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


def barany_grinberg(weights: Array, parts: int) -> list[int]:
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
    """What the largest stage is under each rule, for one objective."""

    objective: str  # the figure: `"memory"`, `"time"` or `"flops"`
    certificate: Certificate  # how good our plan is known to be
    values: dict[str, float]  # the largest stage under each rule, ours first

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
    objective: str,
    solution: Solution,
    value: Callable[[Sequence[int]], float],
    others: dict[str, Assignment],
) -> Comparison:
    """Prices our plan and the plans of other rules."""
    values = {OURS: value(solution.assignment)}
    values |= {name: value(assignment) for name, assignment in others.items()}
    return Comparison(objective, solution.certificate, values)
