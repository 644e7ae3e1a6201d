"""The schedules by name: in which order one stage, or one rank, runs its micro-batches.

Every stage runs its forwards, its input gradients and its weight gradients in increasing order of
micro-batches, so that gradients are summed in the same order whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from tarantella_pp.errors import ScheduleError, checked_count
from tarantella_pp.schedule.players import GapFiller, Orders, merge
from tarantella_pp.schedule.schedule import Compute, Kind, Schedule, checked_placement

# Two stages on each rank: down the ranks and up again.
V_SHAPED = ("zb-v", "v-half", "v-min")
# Of all stages: lists of more take minutes to make.
MOST_FORWARDS = 1_000_000
# The schedules that `make_schedule` makes.
SCHEDULE_NAMES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", *V_SHAPED, "forward")


def forward(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage for inference: forwards only."""
    return [Compute(stage, "F", i) for i in range(num_micro_batches)]


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders all forwards, then all backwards: Huang et al., "GPipe", NeurIPS 2019."""
    return _forward_and_back(stage, num_micro_batches, num_micro_batches)


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage so that it holds at most ``num_stages - stage`` micro-batches.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
    ICML 2021. By the end of the warm-up the first gradient can be there::

        stage 0  F0 F1 .. .. BW0-- F2 BW1-- F3 BW2-- .. BW3--
                 warm-up     steady state      cool-down
        stage 1  .. F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- .. ..
    """
    return _forward_and_back(stage, num_stages - stage, num_micro_batches)


def eager_one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage as 1F1B, with more micro-batches ahead, for links that are not fast.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023. One more
    in flight for each stage that follows leaves messages time to come::

        stage 0  F0 F1 F2 .. .. BW0-- F3 BW1-- BW2-- BW3--
        stage 1  .. .. F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3--
    """
    return _forward_and_back(stage, 2 * (num_stages - stage) - 1, num_micro_batches)


def _forward_and_back(stage: int, in_flight: int, num_micro_batches: int) -> list[Compute]:
    """Orders forwards up to a number in flight, then backwards and forwards in turn."""
    forwards = [Compute(stage, "F", i) for i in range(num_micro_batches)]
    order = forwards[:in_flight]
    for i in range(num_micro_batches):
        order += [Compute(stage, "BW", i), *forwards[in_flight + i : in_flight + i + 1]]
    return order


def zb_h1(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage as ZB-H1: 1F1B with weight gradients put off to fill the bubble.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Stage s runs its weight gradients s
    micro-batches late, so that it holds at most ``num_stages`` micro-batches::

        stage 0  F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        stage 1  .. F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    order: list[Compute] = []
    for action in one_f_one_b(stage, num_stages, num_micro_batches):
        order.append(action if action.kind == "F" else action._replace(kind="B"))
        if action.kind == "BW" and action.micro_batch >= stage:
            order.append(Compute(stage, "W", action.micro_batch - stage))
    # The weight gradients that were put off fill the wait for the last gradients.
    late = max(0, num_micro_batches - stage)
    return order + [Compute(stage, "W", i) for i in range(late, num_micro_batches)]


def interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[Compute, ...]:
    """Orders one rank that owns the stages rank, rank + num_ranks, ....

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021. Micro-batches pass through the stages in groups, there of `num_ranks`,
    here larger where that does not come out even; two ranks with the stages 0, 2 and 1, 3::

        rank 0  0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 ...
    """
    # Whole groups first, then without those that do not exist: an order with gaps stays legal,
    # since micro-batches do not depend on each other.
    padded = max(num_ranks, num_micro_batches)
    groups = _groups(padded, padded // num_ranks)
    own = range(rank, num_ranks * stages_per_rank, num_ranks)
    forwards = [Compute(stage, "F", i) for group in groups for stage in own for i in group]
    backwards = [Compute(s, "BW", i) for group in groups for s in reversed(own) for i in group]
    # Rank r has as many forwards ahead as ranks follow, twice where stages interleave, for then
    # messages go round the ring; and one group for each stage that it has besides.
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


def zb_v(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Compute, ...]:
    """Orders one rank that owns the stages ``rank`` and ``2 * num_ranks - 1 - rank``.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6. The stages go down the
    ranks and up again, like a V, so that the rank with the first stage has the last one as well
    and sees the first gradient without a message::

        rank 0  stage 0   stage 5
        rank 1  stage 1   stage 4
        rank 2  stage 2 > stage 3

    The order needs ``2 * num_ranks - 1`` micro-batches; it is made for that many at least and
    loses those that do not exist.
    """
    padded = max(2 * num_ranks - 1, num_micro_batches)
    stages = (rank, 2 * num_ranks - 1 - rank)
    count: dict[tuple[int, Kind], int] = {}
    order: list[Compute] = []

    def run(half: int, *kinds: Kind) -> None:
        """Runs the next computation of each of these kinds of one half of the V."""
        for kind in kinds:
            index = count.get((half, kind), 0)
            if index < padded:
                order.append(Compute(stages[half], kind, index))
                count[half, kind] = index + 1

    # Down the V: forwards until the first micro-batch has come up to this rank again.
    for _ in range(2 * (num_ranks - rank) - 1):
        run(0, "F")
    for _ in range(rank):
        run(1, "F")
        run(0, "F")
    for _ in range(num_ranks - rank):
        run(1, "F", "B", "W")
    # Steady state: both halves in turn, so that memory freed by one goes to the other.
    while count[1, "F"] < padded:
        run(0, "F", "B", "W")
        run(1, "F", "B", "W")
    for _ in range(rank):
        run(0, "B")
        run(1, "B")
    for _ in range(num_ranks - rank):
        run(0, "B", "W")
    # What is left are weight gradients, for which nobody waits.
    for half in (1, 0):
        for _ in range(num_ranks):
            run(half, "W")
    return tuple(action for action in order if action.micro_batch < num_micro_batches)


def v_blocks(name: str, num_ranks: int, num_micro_batches: int) -> Orders:
    """Orders the ranks of `v-half` and `v-min`: stages as in `zb_v`, for a half or a third of 1F1B.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. Six slots hold F, B
    and W of a rank's two stages, so that a micro-batch begins every six slots and runs like the
    one before. The sooner it is back, the fewer are in flight. `v-min` takes a slot for each stage;
    `v-half` takes two up the V, which leaves time for messages and unequal computations. The first
    micro-batch of `v-min` on four ranks; other micro-batches, and W, have the other slots::

        slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
        rank 0 F0 .. .. .. .. .. .. F7 B7 .. .. .. .. .. .. B0
        rank 1 .. F1 .. .. .. .. F6 .. .. B6 .. .. .. .. B1 ..
        rank 2 .. .. F2 .. .. F5 .. .. .. .. B5 .. .. B2 .. ..
        rank 3 .. .. .. F3 F4 .. .. .. .. .. .. B4 B3 .. .. ..
    """
    # Slots from rank to rank up the V; slots of its turn forward and back, with which no two
    # computations of a rank ever meet; slots by which W may come late.
    if name == "v-half":
        up, there, back, late = (2, 1, 2, 0) if num_ranks % 2 else (2, 4, 5, 0)
    else:
        up, there, back, late = (1, 1, 1, 1 + num_ranks % 3) if num_ranks % 3 else (1, 3, 3, 1)
    last = num_ranks - 1
    end = last + there + up * last
    orders, limits = [], [0] * (2 * num_ranks)
    for rank in range(num_ranks):
        slots = []
        way_up = up * (last - rank)
        for stage, forward, backward in (
            (rank, rank, end + 1 + last + back + way_up),
            (2 * num_ranks - 1 - rank, last + there + way_up, end + 1 + rank),
        ):
            limits[stage] = 1 + (backward - forward + late) // 6
            for i in range(num_micro_batches):
                slots.append((forward + 6 * i, Compute(stage, "F", i)))
                slots.append((backward + 6 * i, Compute(stage, "B", i)))
        orders.append([action for _, action in sorted(slots)])
    player = GapFiller(orders, limits, _folded(2 * num_ranks), num_micro_batches)
    player.play()
    return player.orders()


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
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Makes a schedule of computations; `lower` adds the messages."""
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(
            f"Expected one of {', '.join(SCHEDULE_NAMES)}; zb-auto is searched for with costs. "
            f"Received: schedule={name!r}"
        )
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, num_ranks=num_ranks)
    if num_stages * num_micro_batches > MOST_FORWARDS:
        raise ScheduleError(
            f"Expected at most {MOST_FORWARDS} forward passes in a step. Received: num_stages="
            f"{num_stages}, num_micro_batches={num_micro_batches}. Take fewer micro-batches."
        )
    where = make_placement(num_stages, num_ranks, placement, v_shaped=name in V_SHAPED)
    orders = _orders(name, num_micro_batches, where)
    return Schedule(name, num_stages, num_micro_batches, 1 + max(where), where, orders)


def make_placement(
    num_stages: int,
    num_ranks: int | None,
    placement: Sequence[int] | None,
    *,
    v_shaped: bool = False,
) -> tuple[int, ...]:
    """Checks the options that say which rank owns which stages, and fills in the defaults."""
    if placement is not None:
        return checked_placement(placement, num_stages, num_ranks or len(set(placement)))
    usual = num_stages // 2 if v_shaped else num_stages
    ranks = usual if num_ranks is None else num_ranks
    fits = num_stages == 2 * ranks if v_shaped else num_stages % ranks == 0
    if not fits:
        even = "a number of ranks that divides the number of stages"
        wanted = "two stages for each rank" if v_shaped else even
        raise ScheduleError(
            f"Expected {wanted}. Received: num_stages={num_stages}, num_ranks={num_ranks}"
        )
    return _folded(num_stages) if v_shaped else _round_robin(num_stages, ranks)


def _round_robin(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    return tuple(stage % num_ranks for stage in range(num_stages))


def _folded(num_stages: int) -> tuple[int, ...]:
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


def is_v_shaped(placement: Sequence[int]) -> bool:
    """Returns whether each rank r owns the stages r and ``num_stages - 1 - r``."""
    return len(placement) % 2 == 0 and tuple(placement) == _folded(len(placement))


def check_counts(**counts: int | None) -> None:
    """Refuses counts that are not positive whole numbers; None stands for a default."""
    for option, value in counts.items():
        if value is not None:
            checked_count(option, value)


def _orders(name: str, num_micro_batches: int, placement: tuple[int, ...]) -> Orders:
    num_stages, num_ranks = len(placement), 1 + max(placement)
    if name == "interleaved":
        if placement != _round_robin(num_stages, num_ranks):
            raise ScheduleError(
                "Expected stage s on rank s % num_ranks for the interleaved schedule. "
                f"Received: placement={placement}"
            )
        depth = num_stages // num_ranks
        return tuple(interleaved(r, num_ranks, depth, num_micro_batches) for r in range(num_ranks))
    if name in V_SHAPED:
        if not is_v_shaped(placement):
            raise ScheduleError(
                f"Expected stages r and num_stages - 1 - r on rank r for the {name} schedule. "
                f"Received: placement={placement}"
            )
        if name != "zb-v":
            return v_blocks(name, num_ranks, num_micro_batches)
        return tuple(zb_v(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    order = _STAGE_ORDERS[name]
    orders = [order(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    return merge(orders, placement, num_micro_batches)
