"""What a solver hands back: the stages, and how good they are known to be."""

from __future__ import annotations

from dataclasses import dataclass

#: Two values this close (relative) count as equal: the rounding of long float sums, no more.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a plan is known to be.

    Attributes:
        value: Bottleneck of the plan in the objective's unit (bytes, seconds, FLOPs ...).
        lower_bound: No acyclic plan within the same limits has a smaller bottleneck.
        gap: `value / lower_bound - 1`; 0.0 when proven optimal.
        optimal: Whether the value is proven optimal (to 1e-9, relative).
        method: Which solver found and proved it, in words.
        seconds: Wall-clock time that the solver took.
    """

    value: float
    lower_bound: float
    gap: float
    optimal: bool
    method: str
    seconds: float

    @classmethod
    def of(cls, value: float, lower_bound: float, method: str, seconds: float) -> Certificate:
        """Makes the certificate that follows from a value and a bound.

        Args:
            value: Bottleneck of the plan.
            lower_bound: A proven bound; rounding may put it above the value, it is cut there.
            method: Which solver found and proved it.
            seconds: Wall-clock time of the solver.

        Returns:
            The certificate; it claims optimality only where the bound meets the value.
        """
        bound = min(value, max(lower_bound, 0.0))
        optimal = value <= bound * (1 + TOLERANCE)
        if optimal:
            return cls(value, value, 0.0, True, method, seconds)
        gap = value / bound - 1 if bound > 0 else float("inf")
        return cls(value, bound, gap, False, method, seconds)

    def __str__(self) -> str:
        """Returns one line: the value, then "optimal" or the gap, then method and time."""
        state = "optimal" if self.optimal else f"gap <= {100 * self.gap:.3g} %"
        return (
            f"bottleneck {self.value:.6g}, lower bound {self.lower_bound:.6g}, "
            f"{state} ({self.method}, {self.seconds:.3g} s)"
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan in numbers.

    Attributes:
        assignment: Stage of each node, in node order; stages count from 0 in pipeline order.
        certificate: How good the plan is known to be.
    """

    assignment: tuple[int, ...]
    certificate: Certificate
