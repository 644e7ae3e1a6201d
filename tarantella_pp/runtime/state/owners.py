"""Which rank each variable of a model is on, and which one trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel


class Owners:
    """The ranks of a model's variables, which are known by identity: names differ between ranks.

    A variable is owned by the rank of the first stage that uses it. One that no stage uses, for
    its results are not needed, is the same everywhere and owned by rank 0.
    """

    def __init__(
        self,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        placement: Sequence[int],
        rank: int,
    ) -> None:
        self._rank = rank
        users = zip(extracted.variables, extracted.graph.users(assignment), strict=True)
        self._ranks = {
            id(variable): tuple(dict.fromkeys(placement[stage] for stage in stages))
            for variable, stages in users
        }

    def ranks(self, variable: Any) -> tuple[int, ...]:
        """The ranks whose stages use a variable, the owner first."""
        return self._ranks.get(id(variable), ())

    def owner(self, variable: Any) -> int:
        """The rank that trains a variable, and has its optimizer state."""
        return next(iter(self.ranks(variable)), 0)

    def is_own(self, variable: Any) -> bool:
        """Whether this rank trains a variable."""
        return self.owner(variable) == self._rank
