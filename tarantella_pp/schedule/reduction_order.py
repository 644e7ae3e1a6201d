"""Where the gradients of stages are summed over replicas, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tarantella_pp.schedule.actions import Action, Compute, Reduce


def reductions(placement: Sequence[int], buckets: Sequence[int], rank: int) -> tuple[Reduce, ...]:
    """Returns the reductions of a rank in the order in which every replica starts them.

    The last stage comes first, for its gradients are there first. The order depends on nothing
    else, so replicas agree whatever their numbers of micro-batches; one that has none of a small
    batch runs these actions alone, with gradients of zero.
    """
    counts = list(enumerate(buckets))[::-1]
    return tuple(
        Reduce(stage, bucket)
        for stage, count in counts
        if placement[stage] == rank
        for bucket in range(count)
    )


class StartingReductions:
    """Says when which reductions of a rank start, while its computations go by.

    Each starts as soon as its stage has its last weight gradient and those before it in the order
    have started. Two stages on a rank, of which the lower one is done first::

        0BW3                2BW3
             nothing starts      2R0 2R1 0R0 start
    """

    def __init__(self, order: Sequence[Reduce], actions: Sequence[Action]) -> None:
        self._left = list(order)[::-1]
        self._weight_gradients = Counter(
            a.stage for a in actions if isinstance(a, Compute) and a.kind in ("W", "BW")
        )

    def after(self, action: Compute) -> Iterator[Reduce]:
        """Yields the reductions that start behind a computation."""
        if action.kind in ("W", "BW"):
            self._weight_gradients[action.stage] -= 1
        while self._left and not self._weight_gradients[self._left[-1].stage]:
            yield self._left.pop()
