"""Where replicas are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.report import as_text
from tests.helpers.plans import chain_graph, plan_of

PLAN = plan_of(chain_graph(6), [0, 0, 1, 1, 2, 2], num_replicas=2)


@given(st.integers(1, 5), st.sampled_from(["pipelines-together", "replicas-together"]))
def test_every_rank_is_one_of_a_pipeline(replicas, placement):
    plan = msgspec.structs.replace(PLAN, num_replicas=replicas, placement=placement)
    pairs = [(r, p) for r in range(replicas) for p in range(3)]
    ranks = [plan.world_rank(*pair) for pair in pairs]
    assert sorted(ranks) == list(range(plan.world_size))
    assert [plan.coordinates(rank) for rank in ranks] == pairs


def test_neighbours():
    apart = msgspec.structs.replace(PLAN, placement="replicas-together")
    assert [PLAN.world_rank(0, position) for position in range(3)] == [0, 1, 2]
    assert [apart.world_rank(0, position) for position in range(3)] == [0, 2, 4]
    assert [apart.world_rank(replica, 1) for replica in range(2)] == [2, 3]


def test_the_table_says_which_ranks_are_which():
    text = " ".join(as_text(PLAN, 200).split())
    ranks = "replica 0 is ranks 0, 1, 2; replica 1 is ranks 3, 4, 5"
    assert f"Placement pipelines-together: {ranks}." in text
    assert "summed over replicas in 3 buckets of up to 32.0 MiB." in text
    assert "Placement" not in as_text(msgspec.structs.replace(PLAN, num_replicas=1), 200)
    apart = msgspec.structs.replace(PLAN, placement="replicas-together", num_replicas=3)
    assert "replica 1 is ranks 1, 4, 7, ...." in " ".join(as_text(apart, 200).split())


@pytest.mark.parametrize(
    ("field", "value"),
    [("placement", "anywhere"), ("fusion_threshold", 0), ("fusion_threshold", -1)],
)
def test_what_cannot_be_is_refused(field, value):
    data = msgspec.json.decode(PLAN.to_json())
    with pytest.raises(PlanError):
        Plan.from_json(msgspec.json.encode({**data, field: value}))


@pytest.mark.parametrize("buckets", [[0], [-1], [513]])
def test_buckets_hold_the_gradients(buckets):
    data = msgspec.json.decode(PLAN.to_json())
    data["stages"][0]["bucket_bytes"] = buckets
    with pytest.raises(PlanError, match=r"stages\[0\] must have its 512 bytes of gradients"):
        Plan.from_json(msgspec.json.encode(data))
