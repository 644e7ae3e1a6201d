"""The rules by which other pipeline libraries cut a model, to compare with."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Array, Blocks, summed
from tarantella_pp.partition.plan.plan_parts import Certificate


def by_rules(blocks: Blocks, prices: Prices, state: Array) -> dict[str, tuple[int, ...]]:
    """Cuts the order of a graph as other libraries do, by the name that a comparison prints.

    - Every stage gets the same number of layers.
    - DeepSpeed's `partition_method="parameters"`: the smallest largest stage by state, in bytes.
    - The smallest largest stage by cost, which the block partition of torchgpipe's
      `balance_by_time` and `balance_by_size` comes close to.
    """
    costs = prices.once + prices.each
    rules = {
        "equal layers": np.ones(len(state)),
        "parameter balance": state if state.any() else costs,
        "cost balance": costs,
    }
    found = {}
    for name, weights in rules.items():
        stages = np.zeros(len(blocks), np.int64)
        items = summed(blocks.owner, weights)
        for stage, begin in enumerate(minimal_maximum(items, min(prices.num_stages, len(blocks)))):
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


OURS = "tarantella"


class Comparison(NamedTuple):
    """What the largest stage is under each rule, for one objective."""

    objective: str  # the figure: `"memory"` or `"flops"`
    certificate: Certificate  # how good our plan is known to be
    values: dict[str, float]  # the largest stage under each rule, ours first

    def ratio(self, rule: str) -> float | None:
        """Returns how many times larger the largest stage is than in our plan."""
        ours = self.values[OURS]
        return self.values[rule] / ours if ours else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, numbers and strings, ready for JSON."""
        rules = {r: {"value": v, "ratio": self.ratio(r)} for r, v in self.values.items()}
        proof = self.certificate
        return {"optimal": proof.optimal, "lower_bound": proof.lower_bound, "rules": rules}
