"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from tarantella_pp.errors import ScheduleError
from tarantella_pp.runtime.schedule import stage_orders
from tarantella_pp.runtime.schedule.actions import Compute
from tarantella_pp.runtime.schedule.interleaved import interleaved
from tarantella_pp.runtime.schedule.merging import merge
from tarantella_pp.runtime.schedule.schedule import Schedule

Backward: TypeAlias = Literal["fused", "split"]

_STAGE_ORDERS: dict[str, Callable[[int, int, int], list[Compute]]] = {
    "forward": stage_orders.forward,
    "gpipe": stage_orders.gpipe,
    "1f1b": stage_orders.one_f_one_b,
    "zb-h1": stage_orders.zb_h1,
}
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "forward")


def make_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    backward: Backward | None = None,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Makes a schedule of computations; `lower` adds the messages.

    Every stage runs its micro-batches in increasing order, forwards as well as backwards, so
    that all schedules sum gradients in the same order.

    Args:
        name: One of `SCHEDULE_NAMES`.
        num_stages: Number of pipeline stages.
        num_micro_batches: Number of micro-batches of a step; may be fewer than stages.
        num_ranks: Number of ranks, a divisor of `num_stages`; stage s is on rank
            ``s % num_ranks``. Default: one rank for each stage.
        backward: ``fused`` runs both gradients of a micro-batch together, ``split`` the input
            gradient first, so that the stage before need not wait for the weight gradient.
            Default: ``fused``, but zero-bubble schedules are always ``split``.
        placement: Rank of each stage, instead of ``s % num_ranks``.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If an option cannot work; names it.
    """
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(
            f"Expected one of {', '.join(SCHEDULE_NAMES)}. Received: schedule={name!r}"
        )
    placement = _check_placement(name, num_stages, num_micro_batches, num_ranks, placement)
    num_ranks = 1 + max(placement)
    if name == "interleaved":
        per_rank = num_stages // num_ranks
        ranks = tuple(
            interleaved(rank, num_ranks, per_rank, num_micro_batches) for rank in range(num_ranks)
        )
    else:
        order = _STAGE_ORDERS[name]
        orders = [order(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
        ranks = merge(orders, placement)
    if _check_backward(name, backward) == "split":
        ranks = tuple(tuple(part for action in own for part in _split(action)) for own in ranks)
    return Schedule(name, num_stages, num_micro_batches, num_ranks, placement, ranks)


def _check_placement(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None,
    placement: Sequence[int] | None,
) -> tuple[int, ...]:
    """Checks the numbers and returns the rank of each stage."""
    num_ranks = num_stages if num_ranks is None and placement is None else num_ranks
    for option, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
        ("num_ranks", 1 if num_ranks is None else num_ranks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(
                f"Expected a whole number of at least 1. Received: {option}={value!r}"
            )
    if placement is None:
        if num_ranks is None or num_stages % num_ranks:
            raise ScheduleError(
                "Expected a number of ranks that divides the number of stages. Received: "
                f"num_stages={num_stages}, num_ranks={num_ranks}"
            )
        return tuple(stage % num_ranks for stage in range(num_stages))
    ranks = set(placement)
    if len(placement) != num_stages or ranks != set(range(num_ranks or len(ranks))):
        raise ScheduleError(
            f"Expected the rank of each of the {num_stages} stages, with every rank from 0 in "
            f"use. Received: placement={tuple(placement)}, num_ranks={num_ranks}"
        )
    if name == "interleaved" and any(r != s % len(ranks) for s, r in enumerate(placement)):
        raise ScheduleError(
            "Expected stage s on rank s % num_ranks for the interleaved schedule. "
            f"Received: placement={tuple(placement)}"
        )
    return tuple(placement)


def _check_backward(name: str, backward: Backward | None) -> Backward:
    default: Backward = "split" if name.startswith("zb-") else "fused"
    if backward not in (None, "fused", "split"):
        raise ScheduleError(f"Expected 'fused' or 'split'. Received: backward={backward!r}")
    if default == "split" and backward == "fused":
        raise ScheduleError(f"Expected backward='split' for {name}. Received: backward='fused'")
    return backward or default


def _split(action: Compute) -> tuple[Compute, ...]:
    """Puts the input gradient and the weight gradient apart, one behind the other."""
    if action.kind != "BW":
        return (action,)
    return (action._replace(kind="B"), action._replace(kind="W"))
