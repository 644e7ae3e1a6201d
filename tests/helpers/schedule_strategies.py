"""Schedules for hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from tarantella_pp.schedule import (
    SCHEDULE_NAMES,
    SEARCHED,
    V_SHAPED,
    Schedule,
    lower,
    make_schedule,
    search_schedule,
)


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 6, max_micro_batches: int = 12) -> Schedule:
    """Any schedule of a catalogue name, its computations only, with some R or none."""
    schedule = draw(_named(max_stages, max_micro_batches))
    if not schedule.has_backward or draw(st.booleans()):
        return schedule
    actions = [list(own) for own in schedule.actions]
    for own in actions:
        backward = [action for action in own if action.kind in ("B", "BW")]
        for action in draw(st.lists(st.sampled_from(backward), unique=True, max_size=4)):
            first = 1 + own.index(action._replace(kind="F"))
            own.insert(draw(st.integers(first, own.index(action))), action._replace(kind="R"))
    return replace(schedule, actions=tuple(map(tuple, actions)))


@st.composite
def _named(draw: st.DrawFn, max_stages: int, max_micro_batches: int) -> Schedule:
    name = draw(st.sampled_from((*SCHEDULE_NAMES, SEARCHED)))
    num_stages = draw(st.integers(1, max_stages))
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    if name in V_SHAPED:
        return make_schedule(name, 2 * ((num_stages + 1) // 2), num_micro_batches)
    divisors = [ranks for ranks in range(1, num_stages + 1) if num_stages % ranks == 0]
    size = (num_stages, num_micro_batches, draw(st.sampled_from(divisors)))
    if name == SEARCHED:
        return search_schedule(*size, in_flight_limit=draw(st.none() | st.integers(1, 6)))
    return make_schedule(name, *size)


@st.composite
def lowered_schedules(
    draw: st.DrawFn, max_stages: int = 6, max_micro_batches: int = 12
) -> Schedule:
    """Any schedule, lowered for a chain or for links between any stages, reduced or not."""
    schedule = draw(schedules(max_stages, max_micro_batches))
    size = schedule.num_stages
    buckets = ()
    if schedule.has_backward and draw(st.booleans()):
        buckets = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    if draw(st.booleans()):
        return lower(schedule, buckets=buckets)
    stages = range(schedule.num_stages)
    every = [(source, target) for target in stages for source in range(target)]
    links = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    gradient_links = draw(st.lists(st.sampled_from(links), unique=True)) if links else []
    return lower(schedule, links, gradient_links, buckets)
