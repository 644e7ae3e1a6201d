"""Memory of gradients on their way between replicas."""

from __future__ import annotations

import msgspec
import pytest

from tarantella_pp.partition.costs.gradient_sums import GradientSums
from tarantella_pp.partition.costs.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.graph.keras_reader import extract
from tests.helpers.runner import random_stages
from tests.zoo import models

pytestmark = pytest.mark.keras

ROWS = 6
WAYS = [
    GradientSums(2),
    GradientSums(3, gradient_dtype="bfloat16"),
    GradientSums(2, sharded=True),
    GradientSums(3, sharded=True),
    GradientSums(3, sharded=True, gradient_dtype="bfloat16", fusion_threshold=100),
]
READ = {build.__name__: extract(build()).graph for build in models.READ}


@pytest.mark.parametrize(
    ("sums", "share", "copies"),
    [
        (GradientSums(1), 1.0, 0),
        (GradientSums(2), 1.0, 1 + 1),  # packed, and the sum
        (GradientSums(5), 1.0, 1 + 1),
        (GradientSums(5, fusion_threshold=1), 1.0, 1),  # each alone in its bucket
        (GradientSums(5, gradient_dtype="bfloat16"), 1.0, 1 + 0.5 + 0.5 + 1),
        (GradientSums(3, sharded=True), 1.0, 1 + 2),  # packed, and what two others send
        (GradientSums(3, sharded=True), 0.0, 1 + 1),  # packed, and the new value
        (GradientSums(3, sharded=True, fusion_threshold=1), 0.5, 2 * 0.5 + 0.5),
        (GradientSums(3, True, 1, "bfloat16"), 1.0, 2 * 0.5 + 0.5 + 1),
        (GradientSums(3, True, 1, "bfloat16"), 0.0, 0.5 + 1),
        (GradientSums(3, gradient_dtype="float32"), 1.0, 1 + 1),  # as it is
    ],
)
def test_copies_of_a_weight(sums, share, copies):
    graph = extract(models.mlp()).graph
    found = sums.weight_bytes(graph, ROWS, share)
    assert found == [copies * weight.bytes for weight in graph.weights]


def test_the_gradient_of_a_table_is_the_rows_that_all_replicas_look_up():
    graph = extract(models.embedding_with_mask()).graph
    table, *rest = graph.weights
    ids = 5
    assert table.shape == (6, 4)
    plain, shared_out = (
        GradientSums(2, sharded).weight_bytes(graph, ROWS, 0.25) for sharded in (False, True)
    )
    rows = 2 * ROWS * ids
    assert plain[0] == rows * (4 * 4 + 8)
    assert shared_out[0] == plain[0] + 0.75 * table.bytes
    narrow = GradientSums(2, gradient_dtype="bfloat16").weight_bytes(graph, ROWS, 1.0)
    assert narrow[0] == rows * (4 * 2 + 8)
    assert plain[1:] == [2 * weight.bytes for weight in rest]


@pytest.mark.parametrize("build", [models.tied_variable, models.tied_head])
def test_a_table_that_is_multiplied_has_a_dense_gradient(build):
    graph = extract(build()).graph
    dense = GradientSums(2, fusion_threshold=1).weight_bytes(graph, ROWS, 1.0)
    assert dense == [weight.bytes for weight in graph.weights]


def test_frozen_weights_stay_where_they_are():
    graph = extract(models.frozen_start()).graph
    for sums in WAYS:
        for size, weight in zip(sums.weight_bytes(graph, ROWS, 0.5), graph.weights, strict=True):
            assert (size > 0) == weight.trainable


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("sums", WAYS, ids=str)
def test_stages_have_what_the_weights_that_they_train_have(name, sums):
    """Of the replica with most of it, added up weight by weight; all else is as without."""
    graph = READ[name]
    slots = optimizer_state_bytes(None, graph.weights)
    shards = sums.replicas if sums.sharded else 1
    costs = StageCostModel(graph, slots, 3, None, ROWS // 3, shards=shards, sums=sums)
    alone = StageCostModel(graph, slots, 3, None, ROWS // 3, shards=shards)
    for seed in range(4):
        assignment = random_stages(graph, 3, seed)
        if set(assignment) != {0, 1, 2}:
            continue
        users, held = graph.users(assignment), [3, 2, 1]
        owners = costs.replicas(users)
        mean = costs.reduction_bytes()
        stages, before = costs.stages(assignment, held), alone.stages(assignment, held)
        for number, (stage, without) in enumerate(zip(stages, before, strict=True)):
            own = [w.id for w in graph.weights if users[w.id] and users[w.id][0] == number]
            each = []
            for replica in range(shards):
                sizes = [sums.weight_bytes(graph, ROWS, share) for share in (0.0, 1.0)]
                each.append(sum(sizes[owners[w] == replica][w] for w in own))
            assert max(each) <= stage.reduction_bytes < max(each) + 1
            assert stage.reduction_bytes >= sum(mean[w] for w in own) - 1e-6
            assert msgspec.structs.replace(stage, reduction_bytes=0) == without
            assert stage.memory_bytes == without.memory_bytes + stage.reduction_bytes
