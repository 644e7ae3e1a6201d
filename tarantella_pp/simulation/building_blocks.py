"""Schedules that repeat what one micro-batch does: little memory on ranks of two stages each."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.schedule.actions import Compute, Kind
from tarantella_pp.schedule.list_scheduling import Orders

_SLOTS = 6
"""F, B and W of both stages of a rank: a micro-batch begins so many slots after the one before."""
V_MIN = (1, 1, 1, 1)
V_HALF = (1, 2, 1, 2)


def v_orders(num_ranks: int, num_micro_batches: int, steps: Sequence[int]) -> Orders:
    """Makes the orders of a V-shaped pipeline in which all micro-batches do the same.

    A micro-batch goes down and up through the ranks forward, and down and up backward. The slots
    from rank to rank on these four ways say how long activations are kept, and so how many
    micro-batches are in flight: Qi et al., "Pipeline Parallelism with Controllable Memory",
    NeurIPS 2024. `V_MIN` holds a third of what 1F1B holds, `V_HALF` about half. W takes the slots
    that are left.
    """
    taken: list[set[int]] = [set() for _ in range(num_ranks)]
    block: list[list[tuple[int, Compute]]] = [[] for _ in range(num_ranks)]

    def put(rank: int, slot: int, stage: int, kind: Kind) -> int:
        while slot % _SLOTS in taken[rank]:
            slot += 1
        taken[rank].add(slot % _SLOTS)
        block[rank].append((slot, Compute(stage, kind, 0)))
        return slot

    def rank_of(stage: int) -> int:
        return min(stage, 2 * num_ranks - 1 - stage)

    slot, stages = -1, list(range(2 * num_ranks))
    ways: tuple[tuple[Kind, list[int], Sequence[int]], ...] = (
        ("F", stages, steps[:2]),
        ("B", stages[::-1], steps[2:]),
    )
    for kind, order, (down, up) in ways:
        for position, stage in enumerate(order):
            turns = position in (0, num_ranks)
            apart = 1 if turns else down if position < num_ranks else up
            slot = put(rank_of(stage), slot + apart, stage, kind)
    for rank, own in enumerate(block):
        for done, action in [turn for turn in own if turn[1].kind == "B"]:
            put(rank, done + 1, action.stage, "W")
    return tuple(_repeated(own, num_micro_batches) for own in block)


def _repeated(block: Sequence[tuple[int, Compute]], count: int) -> tuple[Compute, ...]:
    """Lets micro-batches follow each other."""
    turns = [
        (slot + _SLOTS * index, action._replace(micro_batch=index))
        for slot, action in block
        for index in range(count)
    ]
    return tuple(action for _, action in sorted(turns))
