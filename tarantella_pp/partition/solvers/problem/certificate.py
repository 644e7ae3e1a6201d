"""What a solver hands back: the stages, and how good they are known to be."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

#: Two values this close (relative) count as equal: the rounding of long float sums, no more.
TOLERANCE = 1e-9


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How good a plan is known to be.

    Attributes:
        value: Bottleneck of the plan, in bytes, seconds or FLOPs: the largest stage, or the
            largest rank where ranks have several.
        lower_bound: No acyclic plan within the same limits has a smaller bottleneck.
        gap: `value / lower_bound - 1`; 0.0 when proven optimal, `None` where the bound is 0.
        optimal: Whether the value is proven optimal (to 1e-9, relative).
        method: Which solver found and proved it, in words.
        seconds: Wall-clock time that the solver took.
    """

    value: float
    lower_bound: float
    gap: float | None
    optimal: bool
    method: str
    seconds: float

    @classmethod
    def of(cls, value: float, lower_bound: float, method: str, seconds: float) -> Certificate:
        """Makes the certificate that follows from a value and a bound."""
        bound = min(value, max(lower_bound, 0.0))
        optimal = value <= bound * (1 + TOLERANCE)
        if optimal:
            return cls(value, value, 0.0, True, method, seconds)
        gap = value / bound - 1 if bound > 0 else None
        return cls(value, bound, gap, False, method, seconds)

    def __str__(self) -> str:
        """Returns one line: the value, the verdict, method and time."""
        return (
            f"bottleneck {self.value:.6g}, {self.verdict()} ({self.method}, {self.seconds:.3g} s)"
        )

    def verdict(self, bound: str | None = None) -> str:
        """Says whether the plan is optimal, or else how far from it at the most."""
        if self.optimal:
            return "optimal"
        if self.gap is None:
            return "no lower bound"
        return f"lower bound {bound or f'{self.lower_bound:.6g}'}, gap <= {100 * self.gap:.2g} %"


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan in numbers.

    Attributes:
        assignment: Stage of each node, in node order; stages count from 0 in pipeline order.
        certificate: How good the plan is known to be.
    """

    assignment: tuple[int, ...]
    certificate: Certificate
