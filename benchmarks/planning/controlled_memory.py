"""Schedules with more or less memory than 1F1B, and what `zb-auto` finds within the same.

    python benchmarks/planning/controlled_memory.py

V-Min, V-Half and ZB-V are played, ZB-H2 and DualPipeV are their authors' formulas; where no
schedule can be as short as ZB-H2's formula, what is possible stands in its place. Memory is of a
rank, in micro-batches of all its stages; bubbles are those of many steps in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tarantella_pp.schedule import Schedule, lower, make_schedule
from tarantella_pp.simulation import Costs, StageCosts, StepRecurrence, search_schedule, simulate
from tarantella_pp.simulation.building_blocks import V_HALF, V_MIN, v_orders

TIMES = {
    "F = B = W": (1.0, 1.0, 1.0),
    "1.5B": (18.522, 18.086, 9.337),
    "14.6B": (11.347, 11.248, 8.132),
}
"""Times by which schedules are compared; the models' are those of the zero-bubble paper."""


def bubble(schedule: Schedule, costs: Costs, busy: float) -> float:
    """How much of each of many steps in a row is idle."""
    period = StepRecurrence.of(lower(schedule), costs).period_seconds
    return max(0.0, 1 - busy / period)


def held(schedule: Schedule) -> float:
    """Micro-batches of a rank's stages that it holds at most, each as large as the others."""
    alike = Costs.uniform(schedule.num_stages)
    per_rank = schedule.num_stages // schedule.num_ranks
    return max(simulate(lower(schedule), alike).peak_bytes) / per_rank


def rows() -> Iterator[Sequence[str]]:
    """Yields the table."""
    yield (
        *("times", "ranks", "micro-batches", "1F1B", "V-Min", "zb-auto", "V-Half", "zb-auto"),
        *("ZB-V", "zb-auto", "DualPipeV", "ZB-H2", "zb-auto"),
    )  # fmt: skip
    for name, (forward, backward, weights) in TIMES.items():
        for ranks in (4, 8, 16):
            for count in (ranks, 2 * ranks, 4 * ranks):
                whole = Costs((StageCosts(forward, backward, weights),) * ranks)
                half = Costs((StageCosts(forward / 2, backward / 2, weights / 2),) * (2 * ranks))
                busy = count * (forward + backward + weights)
                cells = [f"{bubble(make_schedule('1f1b', ranks, count), whole, busy):.3f}"]
                for theirs in v_shaped(ranks, count):
                    ours = search_schedule(
                        2 * ranks, count, placement=theirs.placement, costs=half,
                        in_flight_limit=theirs.held(),
                    )  # fmt: skip
                    cells += [
                        f"{bubble(one, half, busy):.3f} ({held(one):g})" for one in (theirs, ours)
                    ]
                idle = (ranks - 1) * (forward + 2 * backward - weights) / 2
                cells.append(f"{idle / (busy + idle):.3f} ({ranks + 0.5:g})")
                period = max(
                    busy + (ranks - 1) * max(0.0, forward + backward - 2 * weights),
                    least_period(ranks, count, forward, backward, weights),
                )
                cells.append(f"{1 - busy / period:.3f} ({2 * ranks - 1})")
                ours = search_schedule(ranks, count, costs=whole, in_flight_limit=2 * ranks - 1)
                cells.append(f"{bubble(ours, whole, busy):.3f} ({held(ours):g})")
                yield name, str(ranks), str(count), *cells


def least_period(ranks: int, count: int, forward: float, backward: float, weights: float) -> float:
    """Seconds from step to step that no schedule with one stage on each rank is below.

    The first rank has nothing but its F to do until the first B has come back from the last rank.
    And the last rank, which begins when a micro-batch has come all the way, does all its F and B
    before its last B goes all the way back to the first rank, which has a W to do then.
    """
    way = ranks * forward + (ranks - 1) * backward
    begins = max(way, count * forward) + count * (backward + weights)
    ends = (ranks + count - 1) * (forward + backward) + weights
    return max(begins, ends)


def v_shaped(ranks: int, count: int) -> list[Schedule]:
    """V-Min, V-Half and ZB-V."""
    placement = (*range(ranks), *range(ranks)[::-1])
    blocks = [
        Schedule("v", 2 * ranks, count, ranks, placement, v_orders(ranks, count, steps))
        for steps in (V_MIN, V_HALF)
    ]
    return [*blocks, make_schedule("zb-v", 2 * ranks, count)]


if __name__ == "__main__":
    for cells in rows():
        print("| " + " | ".join(cells) + " |", flush=True)
