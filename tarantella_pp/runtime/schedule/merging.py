"""From the order of each stage to the order of each rank that owns several stages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tarantella_pp.runtime.schedule.actions import Compute, Kind

Preference: TypeAlias = Callable[[Compute], tuple[Any, ...]]

_UNITS: dict[Kind, int] = {"F": 1, "B": 1, "W": 1, "BW": 2}
# What a rank takes first; which is best depends on the numbers of ranks, stages and micro-batches.
_PREFERENCES: tuple[Preference, ...] = (
    lambda action: (action.kind == "F", action.micro_batch, -action.stage),
    lambda action: (action.kind == "F", action.stage if action.kind == "F" else -action.stage),
    lambda action: (action.kind != "F", action.micro_batch, -action.stage),
    lambda action: (action.kind != "F", -action.stage),
)


def merge(
    orders: Sequence[Sequence[Compute]], placement: Sequence[int]
) -> tuple[tuple[Compute, ...], ...]:
    """Interleaves the orders of the stages that share a rank.

    All ranks are played at once in unit time; a free rank takes, of the stages whose next
    computation has its inputs, the one that it prefers. Of a few preferences the one that ends
    first counts. Orders found by playing can be played again, so no rank ever waits for itself.

    Args:
        orders: The computations of each stage in order; those of a chain of stages.
        placement: Rank of each stage.

    Returns:
        The computations of each rank, in order; each stage's own order is kept.
    """
    own: list[list[int]] = [[] for _ in range(1 + max(placement))]
    for stage, rank in enumerate(placement):
        own[rank].append(stage)
    if all(len(stages) == 1 for stages in own):
        return tuple(tuple(orders[stages[0]]) for stages in own)
    played = [_play(orders, placement, own, preference) for preference in _PREFERENCES]
    _, merged = min(played, key=lambda outcome: outcome[0])
    return tuple(map(tuple, merged))


def _play(
    orders: Sequence[Sequence[Compute]],
    placement: Sequence[int],
    own: Sequence[Sequence[int]],
    preference: Preference,
) -> tuple[int, list[list[Compute]]]:
    """Plays all ranks; returns the time of the end and what each rank did."""
    merged: list[list[Compute]] = [[] for _ in own]
    taken = [0] * len(placement)
    free = [0] * len(own)
    ends: dict[tuple[int, str, int], int] = {}
    queue = [(0, rank) for rank in range(len(own))]
    while queue:
        now, rank = heapq.heappop(queue)
        if now < free[rank]:
            continue
        ready = [
            orders[stage][taken[stage]]
            for stage in own[rank]
            if taken[stage] < len(orders[stage])
            and _inputs_end(orders[stage][taken[stage]], ends, len(placement)) <= now
        ]
        if not ready:
            continue
        action = min(ready, key=preference)
        merged[rank].append(action)
        taken[action.stage] += 1
        free[rank] = end = now + _UNITS[action.kind]
        ends[action.stage, action.kind[0], action.micro_batch] = end
        heapq.heappush(queue, (end, rank))
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= neighbour < len(placement):
            heapq.heappush(queue, (end, placement[neighbour]))
    return max(free), merged


def _inputs_end(action: Compute, ends: dict[tuple[int, str, int], int], num_stages: int) -> float:
    """Returns when the last input of an action is there; infinity while one is not begun."""
    stage, kind, i = action
    never = float("inf")
    if kind == "F":
        return ends.get((stage - 1, "F", i), never) if stage else 0
    if kind == "W":
        return ends.get((stage, "B", i), never)
    own = ends.get((stage, "F", i), never)
    return own if stage == num_stages - 1 else max(own, ends.get((stage + 1, "B", i), never))
