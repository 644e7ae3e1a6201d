"""The minimum cut against every choice of what to keep."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.graph.least_kept import MOST_FOR_CHEAP, Operation, least_kept


@st.composite
def forward_passes(draw):
    """A few operations that read what earlier ones made, and what their backward pass needs."""
    number = draw(st.integers(1, 6))
    operations = []
    for place in range(number):
        read = draw(st.sets(st.integers(0, place - 1), max_size=2)) if place else set()
        flops = draw(st.sampled_from([0.0, 1.0, 100.0, 1e4, math.inf])) if read else math.inf
        size = float(draw(st.integers(1, 50)))
        operations.append(Operation(tuple(read), ((place, size),), flops, draw(st.booleans())))
    return operations, draw(st.sets(st.integers(0, number - 1), min_size=1))


def price(operations, needed, kept, worth):
    """What it costs to keep some values; infinite where that is not enough."""
    todo, again = [value for value in needed if value not in kept], set()
    while todo:
        place = todo.pop()
        if place not in again:
            again.add(place)
            todo += [value for value in operations[place].reads if value not in kept]
    dear = [operations[place].dear and worth <= MOST_FOR_CHEAP for place in again]
    flops = math.inf if any(dear) else sum(operations[place].flops for place in again)
    size = sum(operations[place].makes[0][1] for place in kept)
    if math.isinf(worth):
        return math.inf if math.isinf(flops) else size
    return worth * size + flops


@given(forward_passes(), st.sampled_from([0.0, 1.0, 20.0, 1000.0, math.inf]))
def test_no_choice_is_cheaper(made, worth):
    operations, needed = made
    kept = least_kept(operations, needed, worth)
    if not worth:
        assert kept == needed
        return
    every = range(len(operations))
    choices = (set(c) for n in range(len(every) + 1) for c in itertools.combinations(every, n))
    cheapest = min(price(operations, needed, choice, worth) for choice in choices)
    assert math.isclose(price(operations, needed, kept, worth), cheapest)
