"""The minimum cut against every choice of what to keep."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.graph.least_kept import (
    FLOPS_PER_BYTE,
    LARGE_PART,
    Operation,
    least_kept,
)


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
    dear = [operations[place].dear and worth <= FLOPS_PER_BYTE for place in again]
    flops = math.inf if any(dear) else sum(operations[place].flops for place in again)
    size = sum(operations[place].makes[0][1] for place in kept)
    if math.isinf(worth):
        return math.inf if math.isinf(flops) else size
    return worth * size + flops


@given(forward_passes(), st.sampled_from([0.0, 1.0, 20.0, 1000.0, math.inf]))
def test_no_choice_is_cheaper(made, worth):
    operations, needed = made
    kept = least_kept(operations, needed, [worth] * len(operations)).values
    if not worth:
        assert kept == needed
        return
    every = range(len(operations))
    choices = (set(c) for n in range(len(every) + 1) for c in itertools.combinations(every, n))
    cheapest = min(price(operations, needed, choice, worth) for choice in choices)
    assert math.isclose(price(operations, needed, kept, worth), cheapest)


def test_long_chains_are_cut_part_by_part_and_each_operation_has_its_price():
    """Products of 200 FLOPs for each byte that they make; the last one reads the tokens, too."""
    chain = [Operation((), ((0, 8.0), ("tokens", 0.5)))]
    chain += [Operation((i - 1,), ((i, 8.0),), 1600.0, True) for i in range(1, 4 * LARGE_PART)]
    chain[-1] = chain[-1]._replace(reads=(*chain[-1].reads, "tokens"))
    every, cheap = range(len(chain)), range(2 * LARGE_PART)
    ends = {place * LARGE_PART - 1 for place in (1, 2, 3)}
    rest = [math.inf] * len(cheap)
    for worth, kept in (
        ([math.inf] * len(chain), {0} | ends),
        ([190.0] * len(chain), {*every}),
        ([190.0] * len(cheap) + rest, {*cheap} | ends),
    ):
        found = least_kept(chain, every, worth)
        assert found.values == kept | {"tokens"}
        assert found.again == {*every} - kept
