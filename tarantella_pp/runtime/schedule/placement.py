"""Which rank owns which stages."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.errors import ScheduleError


def make_placement(
    num_stages: int,
    num_ranks: int | None,
    placement: Sequence[int] | None,
    *,
    v_shaped: bool = False,
) -> tuple[int, ...]:
    """Checks the options that say which rank owns which stages, and fills in the defaults.

    Args:
        num_stages: Number of stages.
        num_ranks: Number of ranks, a divisor of `num_stages`. Default: as many as stages, or as
            `placement` names; half as many if `v_shaped`.
        placement: Rank of each stage. Default: stage s on rank ``s % num_ranks``.
        v_shaped: Whether the default is stages r and ``num_stages - 1 - r`` on rank r.

    Returns:
        The rank of each stage.

    Raises:
        ScheduleError: If the options do not fit together.
    """
    if placement is None:
        return _default(num_stages, num_ranks, v_shaped)
    ranks = set(placement)
    if len(placement) != num_stages or ranks != set(range(num_ranks or len(ranks))):
        raise ScheduleError(
            f"Expected the rank of each of the {num_stages} stages, with every rank from 0 in "
            f"use. Received: placement={tuple(placement)}, num_ranks={num_ranks}"
        )
    return tuple(placement)


def _default(num_stages: int, num_ranks: int | None, v_shaped: bool) -> tuple[int, ...]:
    """Places stages round robin or V-shaped."""
    if v_shaped:
        if num_stages % 2 or num_ranks not in (None, num_stages // 2):
            raise ScheduleError(
                "Expected two stages for each rank. Received: "
                f"num_stages={num_stages}, num_ranks={num_ranks}"
            )
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    num_ranks = num_stages if num_ranks is None else num_ranks
    if num_stages % num_ranks:
        raise ScheduleError(
            "Expected a number of ranks that divides the number of stages. Received: "
            f"num_stages={num_stages}, num_ranks={num_ranks}"
        )
    return tuple(stage % num_ranks for stage in range(num_stages))


def is_round_robin(placement: Sequence[int]) -> bool:
    """Returns whether stage s is on rank ``s % num_ranks``, as interleaving needs it."""
    num_ranks = 1 + max(placement)
    return all(rank == stage % num_ranks for stage, rank in enumerate(placement))


def is_v_shaped(placement: Sequence[int]) -> bool:
    """Returns whether each rank r owns the stages r and ``num_stages - 1 - r``."""
    last = len(placement) - 1
    return bool(last % 2) and all(
        rank == min(stage, last - stage) for stage, rank in enumerate(placement)
    )
