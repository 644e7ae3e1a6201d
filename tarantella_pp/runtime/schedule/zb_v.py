"""ZB-V: two stages per rank, placed like a V, so that the last stage is on the first rank."""

from __future__ import annotations

from tarantella_pp.runtime.schedule.actions import Compute, Kind


def zb_v(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Compute, ...]:
    """Orders one rank that owns the stages ``rank`` and ``2 * num_ranks - 1 - rank``.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6: no bubble but at the
    start and the end if F, B and W take equally long, with about the memory of 1F1B. The order
    needs ``2 * num_ranks - 1`` micro-batches; it is made for so many at least and loses those
    that do not exist.

    Args:
        rank: The rank, from 0.
        num_ranks: Number of ranks.
        num_micro_batches: Number of micro-batches.

    Returns:
        The rank's computations in order.
    """
    padded = max(2 * num_ranks - 1, num_micro_batches)
    stages = (rank, 2 * num_ranks - 1 - rank)
    count: dict[tuple[int, Kind], int] = {}
    order: list[Compute] = []

    def run(half: int, *kinds: Kind) -> None:
        """Runs the next computation of each of these kinds of one half of the V."""
        for kind in kinds:
            index = count.get((half, kind), 0)
            if index < padded:
                order.append(Compute(stages[half], kind, index))
                count[half, kind] = index + 1

    for _ in range(2 * (num_ranks - rank) - 1):
        run(0, "F")
    for _ in range(rank):
        run(1, "F")
        run(0, "F")
    for _ in range(num_ranks - rank):
        run(1, "F", "B", "W")
    while count[1, "F"] < padded:
        run(0, "F", "B", "W")
        run(1, "F", "B", "W")
    for _ in range(rank):
        run(0, "B")
        run(1, "B")
    for _ in range(num_ranks - rank):
        run(0, "B", "W")
    for half in (1, 0):
        for _ in range(num_ranks):
            run(half, "W")
    return tuple(action for action in order if action.micro_batch < num_micro_batches)
