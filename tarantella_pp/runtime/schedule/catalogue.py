"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from tarantella_pp.errors import ScheduleError
from tarantella_pp.runtime.schedule import stage_orders
from tarantella_pp.runtime.schedule.actions import Compute
from tarantella_pp.runtime.schedule.costs import Costs
from tarantella_pp.runtime.schedule.interleaved import interleaved
from tarantella_pp.runtime.schedule.merging import merge
from tarantella_pp.runtime.schedule.placement import is_round_robin, is_v_shaped, make_placement
from tarantella_pp.runtime.schedule.schedule import Schedule
from tarantella_pp.runtime.schedule.search import search
from tarantella_pp.runtime.schedule.zb_v import zb_v

Backward: TypeAlias = Literal["fused", "split"]
Ranks: TypeAlias = tuple[tuple[Compute, ...], ...]

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "zb-auto", "forward")
_STAGE_ORDERS: dict[str, Callable[[int, int, int], list[Compute]]] = {
    "forward": stage_orders.forward,
    "gpipe": stage_orders.gpipe,
    "1f1b": stage_orders.one_f_one_b,
    "zb-h1": stage_orders.zb_h1,
}


def make_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    backward: Backward | None = None,
    placement: Sequence[int] | None = None,
    costs: Costs | None = None,
    in_flight_limit: int | Sequence[int] | None = None,
) -> Schedule:
    """Makes a schedule of computations; `lower` adds the messages.

    Every stage runs its micro-batches in increasing order, forwards as well as backwards, so
    that all schedules sum gradients in the same order.

    Args:
        name: One of `SCHEDULE_NAMES`; ``forward`` is for inference, ``zb-auto`` searches, which
            takes a fraction of a second for 8 stages and 32 micro-batches, and some seconds for
            32 and 128.
        num_stages: Number of pipeline stages.
        num_micro_batches: Number of micro-batches of a step; may be fewer than stages.
        num_ranks: Number of ranks, a divisor of `num_stages`; stage s is on rank
            ``s % num_ranks``. Default: one rank for each stage; for ``zb-v``, which needs it so,
            one for each two.
        backward: ``fused`` runs both gradients of a micro-batch together, ``split`` the input
            gradient first, so that the stage before need not wait for the weight gradient.
            Default: ``fused``; the zero-bubble schedules choose themselves.
        placement: Rank of each stage, instead of ``s % num_ranks``.
        costs: For ``zb-auto``: seconds of stages and messages. Default: F, B and W take equally
            long and messages no time.
        in_flight_limit: For ``zb-auto``: the most micro-batches that each stage may hold, one
            number or one for each stage. Default: no limit.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If an option cannot work; names it.
    """
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(
            f"Expected one of {', '.join(SCHEDULE_NAMES)}. Received: schedule={name!r}"
        )
    _check_numbers(num_stages, num_micro_batches, num_ranks)
    _check_backward(name, backward)
    if name != "zb-auto" and (costs is not None or in_flight_limit is not None):
        raise ScheduleError(
            f"Expected costs and in_flight_limit for zb-auto only. Received: schedule={name!r}"
        )
    where = make_placement(num_stages, num_ranks, placement, v_shaped=name == "zb-v")
    if name == "zb-auto":
        costs = Costs.uniform(num_stages) if costs is None else costs
        return search(_candidates(num_micro_batches, where), costs, in_flight_limit)
    ranks = _ranks(name, num_micro_batches, where)
    return _schedule(
        name, num_micro_batches, where, _split(ranks) if backward == "split" else ranks
    )


def _ranks(name: str, num_micro_batches: int, placement: tuple[int, ...]) -> Ranks:
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
    return merge(orders, placement)


def _candidates(num_micro_batches: int, placement: tuple[int, ...]) -> list[Schedule]:
    """Returns the known schedules that the search starts from."""
    names = ["1f1b", "zb-h1", "gpipe"]
    names += ["interleaved"] if is_round_robin(placement) else []
    names += ["zb-v"] if is_v_shaped(placement) else []
    variants: list[Ranks] = []
    for name in names:
        ranks = _ranks(name, num_micro_batches, placement)
        variants += [ranks] if name.startswith("zb-") else [ranks, _split(ranks)]
    return [_schedule("zb-auto", num_micro_batches, placement, ranks) for ranks in variants]


def _schedule(
    name: str, num_micro_batches: int, placement: tuple[int, ...], ranks: Ranks
) -> Schedule:
    """Makes the schedule of these computations."""
    return Schedule(name, len(placement), num_micro_batches, 1 + max(placement), placement, ranks)


def _split(ranks: Ranks) -> Ranks:
    """Puts input gradients and weight gradients apart, one behind the other."""
    return tuple(
        tuple(
            part
            for action in own
            for part in (
                (action._replace(kind="B"), action._replace(kind="W"))
                if action.kind == "BW"
                else (action,)
            )
        )
        for own in ranks
    )


def _check_numbers(num_stages: int, num_micro_batches: int, num_ranks: int | None) -> None:
    """Refuses what is not a positive whole number."""
    for option, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
        ("num_ranks", 1 if num_ranks is None else num_ranks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(
                f"Expected a whole number of at least 1. Received: {option}={value!r}"
            )


def _check_backward(name: str, backward: Backward | None) -> None:
    """Refuses an unknown or impossible choice of backward."""
    if backward not in (None, "fused", "split"):
        raise ScheduleError(f"Expected 'fused' or 'split'. Received: backward={backward!r}")
    if backward is not None and (name.startswith("zb-") or name == "forward"):
        raise ScheduleError(
            f"Expected no choice of backward for {name}, which has its own. "
            f"Received: backward={backward!r}"
        )
