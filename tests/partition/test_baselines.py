"""The peers' rules: what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.baselines import by_rules, minimal_maximum
from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Blocks

weights = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=10).map(np.array)


def test_rules_cut_a_chain_as_they_say():
    chain = Blocks.joined(6, [(i, i + 1) for i in range(5)])
    work, state = np.array([1.0, 1, 1, 1, 1, 7]), np.array([9.0, 1, 1, 1, 1, 1])
    found = by_rules(chain, Prices(work, np.zeros(6), np.ones(2)), state)
    assert found["equal layers"] == (0, 0, 0, 1, 1, 1)
    assert found["parameter balance"] == (0, 1, 1, 1, 1, 1)
    assert found["cost balance"] == (0, 0, 0, 0, 0, 1)


def blocks(values, begins):
    ends = [*begins[1:], len(values)]
    return [values[begin:end].sum() for begin, end in zip(begins, ends, strict=True)]


@settings(deadline=None)
@given(weights, st.integers(1, 5))
def test_minimal_maximum_is_minimal(values, parts):
    parts = min(parts, len(values))
    begins = minimal_maximum(values, parts)
    assert len(begins) == parts
    assert begins == sorted(set(begins))
    inner = itertools.combinations(range(1, len(values)), parts - 1)
    best = min(max(blocks(values, [0, *cut])) for cut in inner)
    assert max(blocks(values, begins)) == pytest.approx(best, rel=1e-9, abs=1e-9)
