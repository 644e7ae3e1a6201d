"""The rules by which other pipeline libraries cut a model, to compare with."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from tarantella_pp.partition.cut import Prices, best_cut
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
    parts = {
        name: np.array(even_parts(summed(blocks.owner, weights), prices.num_stages))
        for name, weights in rules.items()
    }
    return {name: tuple(stages[blocks.owner].tolist()) for name, stages in parts.items()}


def even_parts(weights: Array, parts: int) -> tuple[int, ...]:
    """Returns the part of each item of a sequence whose heaviest part is as light as can be."""
    count = len(weights)
    chain = Blocks.joined(count, itertools.pairwise(range(count)))
    found = best_cut(chain, Prices(weights, np.zeros(count), np.ones(min(parts, count))))
    assert found is not None  # each part has an item
    return found.assignments[0]


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
