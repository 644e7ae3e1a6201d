"""The validator against a slow, plain judge that shares no code with it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule import (
    TRAINING_NAMES,
    V_SHAPED,
    Compute,
    Reduce,
    Schedule,
    ScheduleSpec,
    Transfer,
    lower,
    make_schedule,
    parse_action,
    reductions,
    validate,
)
from tests.helpers.schedule_strategies import lowered_schedules


def is_legal(schedule: Schedule, original: Schedule) -> bool:
    """Plays the ranks one action at a time, with sends that block."""
    for own, before in zip(schedule.actions, original.actions, strict=True):
        counts, needed = (Counter(a for a in x if not repeats(a)) for x in (own, before))
        again = Counter(filter(repeats, own))
        strange = any(action._replace(kind="F") not in own for action in again)
        if counts != needed or strange or max(again.values(), default=1) > 1:
            return False
    lists = [list(own) for own in schedule.actions]
    values: list[set] = [set() for _ in lists]  # what each rank has computed or received
    sent: set = set()
    at = [0] * len(lists)

    def posted(rank: int) -> set:
        found = set()
        start = at[rank]
        while start and not isinstance(lists[rank][start - 1], Compute):
            start -= 1
        for action in lists[rank][start:]:
            if isinstance(action, Compute):
                break
            found.add(action)
        return found | set(lists[rank][:start])

    while any(at[rank] < len(own) for rank, own in enumerate(lists)):
        moved = False
        for rank, own in enumerate(lists):
            if at[rank] == len(own):
                continue
            action = own[at[rank]]
            if isinstance(action, Transfer):
                value = (action.source, action.direction, action.micro_batch)
                other = action._replace(operation="R" if action.operation == "S" else "S")
                if action.operation == "S":
                    if value not in values[rank]:
                        return False
                    if other not in posted(schedule.placement[action.target]):
                        continue
                    sent.add(action)
                elif other not in sent:
                    continue
                else:
                    values[rank].add((*value, action.target))
            elif isinstance(action, Reduce):
                if not may_reduce(schedule, action, own[: at[rank]]):
                    return False
            else:
                if not needs(schedule, action) <= values[rank]:
                    return False
                values[rank] |= {(action.stage, part, action.micro_batch) for part in action.kind}
            at[rank] += 1
            moved = True
        if not moved:
            return False
    return True


def repeats(action) -> bool:
    return isinstance(action, Compute) and action.kind == "R"


def may_reduce(schedule: Schedule, action: Reduce, before: list) -> bool:
    """Whether a stage has all its gradients, and the later stages of its rank are reduced."""
    ready = {a.micro_batch for a in before if isinstance(a, Compute) and a.stage == action.stage
             and "W" in a.kind}  # fmt: skip
    rank = schedule.placement[action.stage]
    first = {
        Reduce(stage, bucket)
        for stage, count in enumerate(schedule.buckets)
        for bucket in range(count)
        if schedule.placement[stage] == rank
        and (stage > action.stage or (stage == action.stage and bucket < action.bucket))
    }
    return len(ready) == schedule.num_micro_batches and first == {
        a for a in before if isinstance(a, Reduce)
    }


def needs(schedule: Schedule, action: Compute) -> set:
    stage, kind, i = action
    rank = schedule.placement[stage]
    if kind in ("R", "W"):
        return {(stage, "F" if kind == "R" else "B", i)}
    needed = set() if kind == "F" else {(stage, "F", i)}
    if kind != "F" and Compute(stage, "R", i) in schedule.actions[rank]:
        needed.add((stage, "R", i))
    pairs = schedule.links if kind == "F" else [(t, s) for s, t in schedule.gradient_links]
    for source, target in pairs:
        if target == stage:
            local = schedule.placement[source] == rank
            needed.add((source, kind[0], i) if local else (source, kind[0], i, stage))
    return needed


@st.composite
def mutants(draw) -> tuple[Schedule, Schedule]:
    """A legal schedule, and one with a single change."""
    original = draw(lowered_schedules(4, 5))
    lists = [list(own) for own in original.actions]
    rank = draw(st.sampled_from([rank for rank, own in enumerate(lists) if own]))
    own = lists[rank]
    index = draw(st.integers(0, len(own) - 1))
    change = draw(
        st.sampled_from(["drop", "duplicate", "swap", "move", "emigrate", "edit", "reverse"])
    )
    if change == "drop":
        own.pop(index)
    elif change == "duplicate":
        lists[draw(st.integers(0, len(lists) - 1))].insert(0, own[index])
    elif change == "swap":
        other = draw(st.integers(max(0, index - 3), min(len(own) - 1, index + 3)))
        own[index], own[other] = own[other], own[index]
    elif change == "move":
        own.insert(draw(st.integers(0, len(own) - 1)), own.pop(index))
    elif change == "emigrate":
        target = lists[draw(st.integers(0, len(lists) - 1))]
        target.insert(draw(st.integers(0, len(target))), own.pop(index))
    elif change == "edit":
        field = draw(st.sampled_from(own[index]._fields))
        value = getattr(own[index], field)
        letters = {
            "kind": ["F", "R", "B", "W", "BW"],
            "operation": ["S", "R"],
            "direction": ["F", "B"],
        }
        new = st.sampled_from(letters[field]) if field in letters else st.integers(0, 6)
        own[index] = own[index]._replace(**{field: draw(new.filter(lambda v: v != value))})
    else:
        own.reverse()
    return original, replace(original, actions=tuple(map(tuple, lists)))


@settings(max_examples=4 * settings().max_examples, suppress_health_check=list(HealthCheck))
@given(mutants())
def test_mutants_are_rejected_unless_they_are_legal(pair):
    original, mutant = pair
    # Without its only backward, one stage and one micro-batch are a legal schedule for inference.
    assume(mutant.has_backward == original.has_backward)
    legal = is_legal(mutant, original)
    event("legal" if legal else "illegal")
    if legal:
        validate(mutant)
    else:
        with pytest.raises(ScheduleError):
            validate(mutant)


def edited(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    text = " ".join(map(str, schedule.actions[rank]))
    assert old in text
    actions = list(schedule.actions)
    actions[rank] = tuple(parse_action(word) for word in text.replace(old, new).split())
    return replace(schedule, actions=tuple(actions))


ONE_F_ONE_B = lower(make_schedule("1f1b", 2, 3))
REDUCED = lower(make_schedule("1f1b", 4, 2, 2), buckets=(1, 0, 2, 1))


def test_reductions_start_behind_the_sends_of_the_last_weight_gradient():
    end = "2BW1 2>1SB1 2A0 2A1 1>0RB0 0BW0 1>0RB1 0BW1 0A0"
    assert " ".join(map(str, REDUCED.actions[0])).endswith(end)
    assert REDUCED.buckets == (1, 0, 2, 1)


@given(st.sampled_from(TRAINING_NAMES), st.integers(1, 3), st.integers(1, 2), st.data())
def test_replicas_reduce_alike_whatever_their_numbers_of_micro_batches(name, ranks, depth, data):
    stages = ranks * (2 if name in V_SHAPED else depth)
    spec = ScheduleSpec.of(name, stages, ranks)
    buckets = data.draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    for count in data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8))):
        schedule = lower(spec.make(count), buckets=buckets)
        validate(schedule)
        for rank, own in enumerate(schedule.actions):
            found = tuple(action for action in own if isinstance(action, Reduce))
            assert found == reductions(spec.placement, buckets, rank)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (1, "1F1 1BW1", "1F1", r"Rank 1: 1B1 is missing"),
        (1, "1BW1", "1BW1 1R1", r"Rank 1, position 6, 1BW1: 1R1 comes after it"),
        (1, "1F1 ", "1R1 1F1 ", r"Rank 1, position 5, 1R1: 1F1 comes after it"),
        (1, "1F1 ", "1F1 1R1 1R1 ", r"Rank 1, position 7, 1R1: 1R1 is there already"),
        (1, "1F1 ", "1F1 0R1 ", r"Rank 1, position 6, 0R1: it belongs to rank 0"),
        (1, "1F1 ", "1F1 1F1 ", r"Rank 1, position 6, 1F1: 1F1 is there already"),
        (1, "1BW1", "0BW1", r"Rank 1, position 6, 0BW1: it belongs to rank 0"),
        (1, "0>1RF1 1F1", "1F1 0>1RF1", r"Rank 1, position 4, 1F1: 0>1RF1 comes after it"),
        (0, "0F0 0>1SF0", "0>1SF0 0F0", r"Rank 0, position 0, 0>1SF0: 0F0 comes after it"),
        (1, "1>0SB0 ", "", r"Rank 1: 1>0SB0 is missing"),
        (1, "1>0SB0", "0>1SB0", r"Rank 1, position 3, 0>1SB0: .* no such action"),
    ],
)
def test_laws_name_rank_position_and_action(rank, old, new, message):
    with pytest.raises(ScheduleError, match=message):
        validate(edited(ONE_F_ONE_B, rank, old, new))


def test_neighbours_that_both_receive_first_deadlock():
    mutant = edited(ONE_F_ONE_B, 0, "0>1SF1 1>0RB0", "1>0RB0 0>1SF1")
    validate(mutant)
    mutant = edited(mutant, 1, "1>0SB0 0>1RF1", "0>1RF1 1>0SB0")
    with pytest.raises(ScheduleError, match=r"Deadlock.*rank 0 at position 3, 1>0RB0, for rank 1"):
        validate(mutant)


@pytest.mark.parametrize("bounds", [[1, 1], [1]])
def test_in_flight_bound(bounds):
    validate(ONE_F_ONE_B, [2, 1])
    with pytest.raises(ScheduleError, match=rf"hold 2, 1. Received: in_flight=\[{bounds[0]}"):
        validate(ONE_F_ONE_B, bounds)


def test_what_is_not_lowered_is_not_validated():
    with pytest.raises(ScheduleError, match="lower"):
        validate(make_schedule("1f1b", 2, 3))


TRAINS, INFERS = make_schedule("1f1b", 2, 2), make_schedule("forward", 2, 2)
WAITS = Schedule.from_text("rank 0: 0F0 0BW0 0F1 0BW1\nrank 1: 1F1 1BW1 1F0 1BW0")
LACKS = Schedule.from_text("rank 0: 0F0 0F1 0BW0\nrank 1: 1F0 1BW0 1F1 1BW1")
NOWHERE = ((0, 2), (1, 0), (0, 0), (-1, 1))


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (WAITS, {}, "rank 0 for 1>0RB0, rank 1 for 0>1RF1"),
        (LACKS, {}, "Rank 0: 0B1 is missing"),
        (ONE_F_ONE_B, {}, "lowered"),
        (TRAINS, {"buckets": (1,)}, "number of buckets for each of the 2 stages"),
        (TRAINS, {"buckets": (1, -1)}, "number of buckets for each of the 2 stages"),
        (INFERS, {"buckets": (1, 1)}, r"no backward passes.*buckets="),
        *((TRAINS, {"links": [one]}, "Received: links") for one in NOWHERE),
        (TRAINS, {"links": [(0, 1)], "gradient_links": [(1, 0)]}, "Received: gradient_links"),
    ],
)
def test_what_cannot_be_lowered_is_refused(schedule, options, message):
    lower(INFERS, buckets=(0, 0))
    with pytest.raises(ScheduleError, match=message):
        lower(schedule, **options)
