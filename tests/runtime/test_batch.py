"""Batches as they travel: cut into micro-batches, shared among replicas, taken apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime import batch

pytestmark = pytest.mark.keras


@given(st.integers(0, 200), st.integers(1, 64))
def test_micro_batches_share_the_rows_evenly(rows, count):
    sizes = batch.micro_batch_sizes(rows, count)
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
    description, leaves = batch.describe(value)
    assert len(batch.tensors_in(description)) == len(leaves)
    again, others = batch.describe(batch.rebuild(description, leaves))
    assert again == description
    assert all(a is b for a, b in zip(leaves, others, strict=True))


def test_what_cannot_travel_is_refused():
    for value in (3, "text", np.float32(1), [np.zeros((2,)), 5]):
        with pytest.raises(UnsupportedModelError, match="batch dimension"):
            batch.describe(value)


@settings(max_examples=2 * settings().max_examples)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_shares_put_together_are_the_batch_of_one_pipeline(rows, micro_batches, replicas):
    shares = batch.batch_shares(rows, micro_batches, replicas)
    assert len(shares) == replicas
    sizes = batch.micro_batch_sizes(rows, micro_batches * replicas)
    counted = [share.own_sizes for share in shares if not share.is_spare]
    assert [size for own in counted for size in own] == list(sizes)
    places = [share.own_rows for share in shares if not share.is_spare]
    assert places[0].start == 0
    assert places[-1].stop == rows
    assert all(a.stop == b.start for a, b in itertools.pairwise(places))
    assert sum(share.counted_rows for share in shares) == rows
    counts = [share.count for share in shares]
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= micro_batches


def test_a_replica_without_samples_runs_the_first_one():
    first, second = batch.batch_shares(1, 4, 2)
    assert (first.own_sizes, first.own_rows, first.counted_rows) == ((1,), slice(0, 1), 1)
    assert second.is_spare
    assert (second.own_sizes, second.own_rows, second.counted_rows) == ((1,), slice(0, 1), 0)
