"""Schedules by name, and which rank owns which stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Compute
from tarantella_pp.schedule.generators import (
    eager_one_f_one_b,
    forward,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tarantella_pp.schedule.list_scheduling import Orders, merge
from tarantella_pp.schedule.schedule import Schedule

Backward: TypeAlias = Literal["fused", "split"]

SCHEDULE_NAMES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v", "forward")
"""The schedules that `make_schedule` makes."""
_STAGE_ORDERS: dict[str, Callable[[int, int, int], list[Compute]]] = {
    "forward": forward,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "zb-h1": zb_h1,
}


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
    """
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(
            f"Expected one of {', '.join(SCHEDULE_NAMES)}; zb-auto is searched for with costs. "
            f"Received: schedule={name!r}"
        )
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, num_ranks=num_ranks)
    _check_backward(name, backward)
    where = make_placement(num_stages, num_ranks, placement, v_shaped=name == "zb-v")
    orders = _orders(name, num_micro_batches, where)
    if backward == "split":
        orders = _split(orders)
    return Schedule(name, num_stages, num_micro_batches, 1 + max(where), where, orders)


def make_placement(
    num_stages: int,
    num_ranks: int | None,
    placement: Sequence[int] | None,
    *,
    v_shaped: bool = False,
) -> tuple[int, ...]:
    """Checks the options that say which rank owns which stages, and fills in the defaults."""
    if placement is None:
        return _default_placement(num_stages, num_ranks, v_shaped)
    ranks = set(placement)
    if len(placement) != num_stages or ranks != set(range(num_ranks or len(ranks))):
        raise ScheduleError(
            f"Expected the rank of each of the {num_stages} stages, with every rank from 0 in "
            f"use. Received: placement={tuple(placement)}, num_ranks={num_ranks}"
        )
    return tuple(placement)


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


def check_counts(**counts: int | None) -> None:
    """Refuses counts that are not positive whole numbers; None stands for a default."""
    for option, value in counts.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ScheduleError(
                f"Expected a whole number of at least 1. Received: {option}={value!r}"
            )


def _orders(name: str, num_micro_batches: int, placement: tuple[int, ...]) -> Orders:
    """Returns the computations of each rank."""
    num_stages, num_ranks = len(placement), 1 + max(placement)
    if name == "interleaved":
        if not is_round_robin(placement):
            raise ScheduleError(
                "Expected stage s on rank s % num_ranks for the interleaved schedule. "
                f"Received: placement={placement}"
            )
        depth = num_stages // num_ranks
        return tuple(
            interleaved(rank, num_ranks, depth, num_micro_batches) for rank in range(num_ranks)
        )
    if name == "zb-v":
        if not is_v_shaped(placement):
            raise ScheduleError(
                "Expected stages r and num_stages - 1 - r on rank r for the zb-v schedule. "
                f"Received: placement={placement}"
            )
        return tuple(zb_v(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    order = _STAGE_ORDERS[name]
    orders = [order(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    return merge(orders, placement, num_micro_batches)


def _split(orders: Orders) -> Orders:
    """Puts input gradients and weight gradients apart, one behind the other."""
    return tuple(
        tuple(
            part
            for action in order
            for part in (
                (action._replace(kind="B"), action._replace(kind="W"))
                if action.kind == "BW"
                else (action,)
            )
        )
        for order in orders
    )


def _default_placement(num_stages: int, num_ranks: int | None, v_shaped: bool) -> tuple[int, ...]:
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


def _check_backward(name: str, backward: Backward | None) -> None:
    """Refuses an unknown or impossible choice of backward."""
    if backward not in (None, "fused", "split"):
        raise ScheduleError(f"Expected 'fused' or 'split'. Received: backward={backward!r}")
    if backward is not None and (name.startswith("zb-") or name == "forward"):
        raise ScheduleError(
            f"Expected no choice of backward for {name}, which has its own. "
            f"Received: backward={backward!r}"
        )
