"""Bubble and memory of the classic schedules as formulas: for any size, without playing.

They hold for equal stages and ranks and messages that take no time. Then each of p ranks works for
m micro-batches, and waits as long as p - 1 of them take: while the first one comes down to it, and
while the first gradient comes up, or the last one goes up. Three ranks and four micro-batches, with
F and BW as long as each other::

    rank 0  F F F F . . . . B B B B                     gpipe
    rank 1  . F F F F . . B B B B .      bubble = (p - 1) / (m + p - 1) = 2 / 6
    rank 2  . . F F F F B B B B . .

With v stages on each rank the ways down and up are v times shorter. With W apart from B only B has
to go up, and W fills the time till then: of three parts of a micro-batch one is waited for.
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Container
from fractions import Fraction

from tarantella_pp.errors import ScheduleError


def bubble_fraction(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1
) -> Fraction:
    """Returns the part of all ranks' time in which they do not compute.

    For ``gpipe``, ``1f1b``, ``eager-1f1b`` and ``interleaved`` with fused backwards, and for
    ``forward``, whatever the seconds of F, B and W; for ``zb-h1`` and ``zb-v`` if all three take
    equally long.
    """
    p, m, v = num_ranks, num_micro_batches, stages_per_rank
    if min(p, m, v) < 1:
        raise ScheduleError(
            f"Expected numbers of at least 1. Received: num_ranks={p}, num_micro_batches={m}, "
            f"stages_per_rank={v}"
        )
    if name not in ("interleaved", "zb-v") and v != 1:
        raise ScheduleError(
            f"Expected one stage per rank for the formula of {name}. Received: stages_per_rank={v}"
        )
    if name in ("gpipe", "1f1b", "eager-1f1b", "forward"):
        work, idle = m, p - 1
    elif name == "interleaved":
        work, idle = v * m, p - 1 if m >= p else v * (p - m) + m - 1
    elif name == "zb-h1":
        work, idle = 3 * m, max(p - 1, 2 * p - 1 - m)
    elif name == "zb-v":
        work, idle = 6 * m, max(p - 1, 4 * p - 2 - 2 * m)
    else:
        raise ScheduleError(
            "Expected gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v or forward. "
            f"Received: schedule={name!r}"
        )
    return Fraction(idle, work + idle)


def speed_up_bound(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1
) -> Fraction:
    """Returns how many times faster than one process a schedule can be at best."""
    bubble = bubble_fraction(name, num_ranks, num_micro_batches, stages_per_rank)
    return num_ranks * (1 - bubble)


MEMORY_FORMULAS = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "forward")
"""The schedules whose memory `in_flight_bounds` and `held_whole_bounds` know."""


def in_flight_bounds(name: str, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Returns the most micro-batches that each stage holds, for any number of ranks."""
    _check_memory_formula(name)
    if name in ("1f1b", "eager-1f1b"):
        ahead = 2 if name == "eager-1f1b" else 1
        after = range(num_stages - 1, -1, -1)
        return tuple(min(1 + ahead * stages, num_micro_batches) for stages in after)
    held = {"gpipe": num_micro_batches, "zb-h1": min(num_stages, num_micro_batches), "forward": 0}
    return (held[name],) * num_stages


def held_whole_bounds(
    name: str, num_stages: int, num_micro_batches: int, except_last: Container[int] = ()
) -> tuple[int, ...]:
    """Returns the most micro-batches that each stage, if it recomputes, holds all of at a time.

    Those that it is in the backward pass of, begun or waiting, and those that it keeps whole.
    """
    _check_memory_formula(name)
    held = in_flight_bounds(name, num_stages, num_micro_batches)
    return tuple(
        min(held[stage], 1 + stage * (name == "zb-h1") + (stage in except_last))
        for stage in range(num_stages)
    )


def send_window(name: str, num_stages: int, num_ranks: int) -> int | None:
    """Returns how many activations a stage may have sent to another that has not taken them.

    Where all forwards come first a stage could run ahead by a whole step, and keep all of it in
    memory. It waits instead: each micro-batch takes as long as the one before, and in such a line
    the slowest stage alone says when the last one is through, as long as it never runs dry. A link
    that skips stages is as many micro-batches behind as it skips; two more make up for unsteady
    times. The wait ends when the receive is posted, so the law that no schedule may deadlock if
    each send blocks until then holds for this one, too.

    Example:
        >>> send_window("gpipe", num_stages=4, num_ranks=4)
        6
    """
    return num_stages + 2 if name in ("gpipe", "forward") and num_ranks == num_stages else None


def _check_memory_formula(name: str) -> None:
    if name not in MEMORY_FORMULAS:
        raise ScheduleError(
            f"Expected one of {', '.join(MEMORY_FORMULAS)}. Received: schedule={name!r}"
        )
