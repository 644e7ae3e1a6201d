from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.optimizer_slots import shard_owners


def fullest(nbytes: list[int], owners: list[int], num_replicas: int) -> int:
    loads = [0] * num_replicas
    for size, owner in zip(nbytes, owners, strict=True):
        loads[owner] += size
    return max(loads)


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_no_replica_has_much_more_than_it_must(nbytes: list[int], num_replicas: int) -> None:
    owners = shard_owners(nbytes, num_replicas)
    best = min(
        fullest(nbytes, [*choice], num_replicas)
        for choice in itertools.product(range(num_replicas), repeat=len(nbytes))
    )
    assert 3 * num_replicas * fullest(nbytes, owners, num_replicas) <= (4 * num_replicas - 1) * best


def test_weights_without_bytes_are_shared_out_too() -> None:
    assert sorted(shard_owners([0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_the_largest_weights_are_apart() -> None:
    assert shard_owners([4, 400, 4, 400, 300], 2) == [1, 0, 1, 1, 0]
    assert shard_owners([5, 7], 1) == [0, 0]
    assert shard_owners([], 4) == []
