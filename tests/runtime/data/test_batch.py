"""Batches as they travel: cut into micro-batches, and taken apart as structures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.data.batch import (
    describe,
    micro_batch_sizes,
    rebuild,
    tensors_in,
)

pytestmark = pytest.mark.keras


@given(st.integers(0, 200), st.integers(1, 64))
def test_micro_batches_share_the_rows_evenly(rows, count):
    sizes = micro_batch_sizes(rows, count)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(rows, count))
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


LEAVES = st.sampled_from([None, np.zeros((2, 3), "float32"), np.zeros((2,), "int64")])
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(NESTS)
def test_structures_are_rebuilt(value):
    description, leaves = describe(value)
    assert len(tensors_in(description)) == len(leaves)
    again, others = describe(rebuild(description, leaves))
    assert again == description
    assert all(a is b for a, b in zip(leaves, others, strict=True))


def test_what_cannot_travel_is_refused():
    for value in (3, "text", np.float32(1), [np.zeros((2,)), 5]):
        with pytest.raises(UnsupportedModelError, match="batch dimension"):
            describe(value)
