"""What two plans do differently: nodes that changed their stage, and what stages cost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Move(NamedTuple):
    """Neighbouring nodes that go from one stage to another.

    Attributes:
        first: Name of the first of them.
        last: Name of the last of them.
        nodes: Their number.
        before: Their stage in the first plan.
        after: Their stage in the second plan.
    """

    first: str
    last: str
    nodes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What two plans do differently.

    Attributes:
        options: Options that differ: from their names to both values.
        removed: Names of nodes that only the first plan has.
        added: Names of nodes that only the second plan has.
        moves: Nodes that changed their stage, neighbours together.
        stages: What each stage costs: from the name of the figure to both values, each `None`
            where that plan has no such stage.
    """

    options: dict[str, tuple[Any, Any]]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    moves: tuple[Move, ...]
    stages: tuple[dict[str, tuple[float | None, float | None]], ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        unmoved = not (self.options or self.removed or self.added or self.moves)
        return unmoved and all(a == b for stage in self.stages for a, b in stage.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, numbers and strings, ready for JSON."""
        moves = [move._asdict() for move in self.moves]
        return {"same": self.same, **asdict(self), "moves": moves}


def difference(
    before: Any, after: Any, options: Sequence[str], figures: Sequence[str]
) -> Difference:
    """Compares two plans of the same kind.

    Nodes are known by their names, the first, second ... of a name each; names that Keras has
    numbered anew are known by their places where both plans are of the same model.
    """
    old, new = _names(before), _names(after)
    if getattr(before, "fingerprint", "") == getattr(after, "fingerprint", None):
        new = old
    there = dict(zip(new, after.assignment, strict=True))
    here = set(old)
    return Difference(
        options={
            name: (getattr(before, name), getattr(after, name))
            for name in options
            if getattr(before, name) != getattr(after, name)
        },
        removed=tuple(name for name in old if name not in there),
        added=tuple(name for name in new if name not in here),
        moves=tuple(_moves(old, before.assignment, there)),
        stages=tuple(_stages(before.stages, after.stages, figures)),
    )


def _names(plan: Any) -> list[str]:
    """Returns a name of its own for each node."""
    seen: Counter[str] = Counter()
    names = []
    for name in plan.node_names:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def _moves(names: Sequence[str], stages: Sequence[int], there: dict[str, int]) -> Iterator[Move]:
    """Yields runs of nodes that make the same move."""
    pairs = zip(names, stages, strict=True)
    common = [(name, before, there[name]) for name, before in pairs if name in there]
    for (before, after), run in itertools.groupby(common, lambda found: found[1:]):
        moved = [name for name, _, _ in run]
        if before != after:
            yield Move(moved[0], moved[-1], len(moved), before, after)


def _stages(
    before: Sequence[Any], after: Sequence[Any], figures: Sequence[str]
) -> Iterator[dict[str, tuple[float | None, float | None]]]:
    """Yields both values of each figure, stage by stage."""
    for old, new in itertools.zip_longest(before, after):
        yield {name: (getattr(old, name, None), getattr(new, name, None)) for name in figures}
