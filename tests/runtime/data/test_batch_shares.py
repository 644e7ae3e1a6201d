"""How a batch is shared: as one pipeline of all micro-batches cuts it, neighbouring ones each."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.runtime.data.batch import batch_shares, micro_batch_sizes
from tests.helpers.draws import examples


@examples(200)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_shares_put_together_are_the_batch_of_one_pipeline(rows, micro_batches, replicas):
    shares = batch_shares(rows, micro_batches, replicas)
    assert len(shares) == replicas
    sizes = micro_batch_sizes(rows, micro_batches * replicas)
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
    first, second = batch_shares(1, 4, 2)
    assert (first.own_sizes, first.own_rows, first.counted_rows) == ((1,), slice(0, 1), 1)
    assert second.is_spare
    assert (second.own_sizes, second.own_rows, second.counted_rows) == ((1,), slice(0, 1), 0)
