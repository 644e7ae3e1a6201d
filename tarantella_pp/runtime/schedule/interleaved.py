"""Interleaved 1F1B: several stages per rank make the bubble smaller, at the price of messages."""

from __future__ import annotations

from itertools import pairwise

from tarantella_pp.runtime.schedule.actions import Compute


def interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[Compute, ...]:
    """Orders one rank that owns stages rank, rank + num_ranks, ....

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021. Micro-batches pass through the stages in groups, there of `num_ranks`.
    Where that does not come out even, groups are larger; with fewer micro-batches than ranks,
    those that are missing from the one group are left out. That keeps the order legal, since
    micro-batches do not depend on each other.

    Args:
        rank: The rank, from 0.
        num_ranks: Number of ranks.
        stages_per_rank: Number of stages of each rank.
        num_micro_batches: Number of micro-batches.

    Returns:
        The rank's computations in order.
    """
    padded = max(num_ranks, num_micro_batches)
    groups = _groups(padded, padded // num_ranks)
    forwards: list[Compute] = []
    backwards: list[Compute] = []
    for group in groups:
        for chunk in range(stages_per_rank):
            stage = chunk * num_ranks + rank
            last = (stages_per_rank - 1 - chunk) * num_ranks + rank
            forwards += [Compute(stage, "F", i) for i in group]
            backwards += [Compute(last, "BW", i) for i in group]
    warm_up = num_ranks - rank - 1
    if stages_per_rank > 1:
        warm_up = 2 * warm_up + (stages_per_rank - 1) * len(groups[0])
    order = forwards[:warm_up]
    for index, action in enumerate(backwards):
        order += [*forwards[warm_up + index : warm_up + index + 1], action]
    return tuple(action for action in order if action.micro_batch < num_micro_batches)


def _groups(num_micro_batches: int, count: int) -> list[range]:
    """Cuts the micro-batches into groups, as even as can be, the larger ones first."""
    size, larger = divmod(num_micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(*pair) for pair in pairwise(starts)]
