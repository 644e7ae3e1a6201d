"""A plan of ours beside those that the rules of other libraries give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.partition.certificate import Certificate, Solution
from tarantella_pp.partition.problem import Problem
from tarantella_pp.partition.rules import RULES

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
        """Returns how many times larger the largest stage is than in our plan.

        Args:
            rule: One of `values`.

        Returns:
            The ratio, over the optimum if the certificate says so; `None` where ours is 0.
        """
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
) -> Comparison:
    """Prices our plan and those of the rules of other libraries.

    Args:
        problem: The problem; its memory limit is nothing that the rules know.
        solution: Our plan.
        value: Prices a plan: from the stage of each node to the largest stage.
        objective: Name of the objective. Default: that of the problem.

    Returns:
        The comparison.
    """
    values = {OURS: value(solution.assignment)}
    values |= {name: value(tuple(rule(problem).tolist())) for name, rule in RULES.items()}
    return Comparison(objective or problem.objective, solution.certificate, values)
