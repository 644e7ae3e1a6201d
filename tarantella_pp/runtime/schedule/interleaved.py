"""Interleaved 1F1B: several stages per rank make the bubble smaller, at the price of messages."""

from __future__ import annotations

from tarantella_pp.runtime.schedule.actions import Compute


def interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[Compute, ...]:
    """Orders one rank that owns stages rank, rank + num_ranks, ....

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021. That order needs a multiple of `num_ranks` micro-batches; for other
    numbers it is made for the next multiple and loses those that do not exist, which keeps it
    legal: micro-batches do not depend on each other.

    Args:
        rank: The rank, from 0.
        num_ranks: Number of ranks.
        stages_per_rank: Number of stages of each rank.
        num_micro_batches: Number of micro-batches.

    Returns:
        The rank's computations in order.
    """
    rounds = -(-num_micro_batches // num_ranks)
    total = rounds * num_ranks * stages_per_rank
    warm_up = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
    warm_up = min(warm_up, total) if stages_per_rank > 1 else min(num_ranks - rank - 1, total)

    def pick(index: int, backward: bool) -> Compute:
        turn, within = divmod(index, num_ranks * stages_per_rank)
        chunk, offset = divmod(within, num_ranks)
        chunk = stages_per_rank - 1 - chunk if backward else chunk
        kind = "BW" if backward else "F"
        return Compute(chunk * num_ranks + rank, kind, turn * num_ranks + offset)  # type: ignore[arg-type]

    order = [pick(index, backward=False) for index in range(warm_up)]
    for index in range(total):
        if warm_up + index < total:
            order.append(pick(warm_up + index, backward=False))
        order.append(pick(index, backward=True))
    return tuple(action for action in order if action.micro_batch < num_micro_batches)
