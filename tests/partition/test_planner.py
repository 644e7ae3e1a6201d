import functools
import re

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.best_stages import rank_totals
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.planner import Planner
from tarantella_pp.schedule import ScheduleSpec
from tests.zoo import models

pytestmark = pytest.mark.keras


def make_plan(model, num_stages, optimizer=None, spec=None, **options):
    options = PlanOptions(num_stages=num_stages, **{"balance": "memory", **options}).settled(spec)
    planner = Planner.of(model, optimizer)
    return planner.write(planner.solve(options), options)


def tower(*widths):
    steps = [layers.Dense(width, activation="relu") for width in widths]
    return models.chain((16,), *steps, name="tower")


@functools.cache
def read(build):
    return extract(build())


@pytest.mark.parametrize("build", models.READ, ids=lambda build: build.__name__)
def test_every_model_is_planned(build):
    plan = make_plan(read(build), 2)
    plan.check(read(build).graph)
    assert plan.certificate.optimal
    assert set(plan.assignment) == {0, 1}
    assert tnt.Plan.from_json(plan.to_json()) == plan


def test_a_recomputing_stage_keeps_its_inputs_and_makes_the_rest_again():
    """Six dense layers with relu: each keeps its input and its output."""
    options = {"batch_size": 64, "num_micro_batches": 4, "balance": "flops"}
    plain = make_plan(tower(*[16] * 6), 2, **options)
    plan = make_plan(tower(*[16] * 6), 2, **options, recompute=[0])
    assert plan.assignment == plain.assignment == (0, 0, 0, 1, 1, 1)
    one = 16 * 16 * 4  # a tensor of a micro-batch
    assert [stage.activation_bytes for stage in plain.stages] == [4 * one, 4 * one]
    assert [stage.activation_bytes for stage in plan.stages] == [one, 4 * one]
    assert [stage.recomputed_bytes for stage in plan.stages] == [3 * one, 0]
    first, old = plan.stages[0], plain.stages[0]
    assert first.memory_bytes == old.memory_bytes - (2 * 4 * one) + (2 + 3) * one
    assert plan.recompute == (0,)
    assert "2 x 1.00K" in str(plan)
    assert "Recomputing: stage 0 100 % of its forward pass; + is" in str(plan)


def test_loops_are_kept_where_the_rest_is_made_again():
    plan = tnt.make_plan(models.attention_kwargs(), 2, recompute=[1])
    names = dict(zip(plan.node_names, plan.recompute_worth, strict=True))
    assert [name[:4] for name, worth in names.items() if worth < 1e9] == ["lstm"]


@pytest.mark.parametrize(
    ("options", "micro_batches", "in_flight"),
    [
        ({"num_stages": 1}, 1, (1,)),
        ({"num_stages": 2}, 4, (2, 1)),
        ({"num_stages": 4}, 12, (4, 3, 2, 1)),
        ({"num_stages": 4, "batch_size": 8}, 8, (4, 3, 2, 1)),
        ({"num_stages": 3, "num_micro_batches": 2}, 2, (2, 2, 1)),
        ({"num_stages": 3, "schedule": "gpipe"}, 8, (8, 8, 8)),
        ({"num_stages": 3, "schedule": "zb-h1"}, 8, (3, 3, 3)),
        ({"num_stages": 2, "schedule": "zb-v"}, 4, (2, 1)),
        ({"num_stages": 4, "spec": ScheduleSpec.of("interleaved", 4, 2)}, 12, (4, 3, 2, 1)),
        ({"num_stages": 2, "batch_size": 4, "num_replicas": 4}, 2, (2, 1)),
        ({"num_stages": np.int64(2), "num_micro_batches": np.int32(3)}, 3, (2, 1)),
    ],
)
def test_options_that_are_left_open(options, micro_batches, in_flight):
    plan = make_plan(tower(8, 8, 8, 8, 8), **options)
    assert plan.num_micro_batches == micro_batches
    assert tuple(stage.in_flight for stage in plan.stages) == in_flight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 9}, "'tower' .*at most num_stages=3, and replicas.*num_stages=9"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_replicas": 64}, "batch_size=32, num_replicas=64"),
        ({"balance": "speed"}, "one of .*'time', 'flops'.*Received: balance='speed'"),
        ({"balance": "time"}, "with a profile. Received: balance='time', profile=None"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": ["1GB"]}, "one for each of the 2 stages"),
        ({"memory_limit": ["1GB", "some"]}, "memory_limit='some'"),
        ({"optimizer": "adamm"}, "optimizer='adamm'"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"recompute": [2]}, r"from 0 to 1.*Received: recompute=\[2\]"),
        ({"recompute": [0, 0]}, r"different stages.*recompute=\[0, 0\]"),
        ({"recompute": [True]}, r"recompute=\[True\]"),
        ({"recompute": {0: "none"}}, "recompute={0: 'none'}"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_plan(tower(8, 8, 8), **{"num_stages": 2, **options})


@pytest.mark.parametrize("balance", ["memory", "flops"])
def test_unequal_devices_have_limits_of_their_own(balance):
    model = tower(*[16] * 8)
    even = make_plan(model, 2, num_micro_batches=2, balance=balance)
    sizes = [stage.memory_bytes for stage in even.stages]
    limits = [int(0.7 * sizes[0]), 2 * sizes[1]]
    plan = make_plan(model, 2, num_micro_batches=2, balance=balance, memory_limit=limits)
    assert plan.limits == plan.memory_limit == tuple(limits)
    pairs = zip(plan.stages, limits, strict=True)
    assert all(stage.memory_bytes <= limit for stage, limit in pairs)
    assert plan.stages[0].nodes < even.stages[0].nodes
    assert tnt.Plan.from_json(plan.to_json()) == plan
    assert f"Memory limit of the stages: {limits[0] / 1024:.1f} KiB, " in str(plan)
    one, two = (
        make_plan(model, 2, num_micro_batches=2, balance=balance, memory_limit=limit)
        for limit in (sizes[0] + 99, [sizes[0] + 99] * 2)
    )
    assert one.assignment == two.assignment
    with pytest.raises(PlanError, match=r"No plan of 2 stages keeps the memory limit"):
        make_plan(model, 2, num_micro_batches=2, memory_limit=[limits[0] // 9, limits[1]])


def test_shared_statistics_that_stages_part_or_that_leave_too_few_of_them_are_named():
    pattern = r"share statistics or seeds, which .* must stay on one stage, e\.g\. inner/dropout"
    with pytest.raises(PlanError, match=pattern):
        make_plan(read(models.nested_twice), 5)
    graph = read(models.nested_twice).graph
    assert graph.misplaced([0] * len(graph.nodes)) is None
    wrong = graph.misplaced([int(i > 3) for i in range(len(graph.nodes))])
    assert re.search(r"share statistics or seeds.*on stages \[0, 1\]", wrong)


def test_tied_weights_are_kept_together_where_that_is_free_and_otherwise_priced():
    def language_model(width, tokens=512):
        ids = keras.Input((8,), dtype="int32")
        table = layers.ReversibleEmbedding(tokens, width)
        x = table(ids)
        for _ in range(6):
            x = layers.Add()([x, layers.Dense(width, activation="relu")(x)])
        return keras.Model(ids, table(x, reverse=True))

    plan = make_plan(language_model(64), 2, num_micro_batches=2, batch_size=4)
    (tie,) = plan.ties
    size = 512 * 64 * 4
    assert (tie.stages, tie.bytes) == ((0, 1), size)
    assert tie.weight.endswith("embeddings")
    first, last = plan.stages
    assert first.optimizer_bytes - last.optimizer_bytes >= 2 * size - 6 * 64 * 65 * 8
    assert "Stages 0, 1 share " in str(plan)
    assert tnt.Plan.from_json(plan.to_json()) == plan
    inputs = keras.Input((8,))
    twice = layers.Dense(8)
    x = layers.Dense(64)(twice(twice(inputs)))
    together = make_plan(keras.Model(inputs, x), 2, num_micro_batches=2, batch_size=4)
    assert together.assignment == (0, 0, 1)
    assert together.ties == ()


def widening(**options):
    """A plan of layers of which the last is wider, for ranks with several stages."""
    machine = tnt.HardwareSpec(6e10, action_seconds=3e-4)
    given = {"num_micro_batches": 4, "balance": "flops", "machine": machine, **options}
    return tnt.make_plan(tower(64, 64, 64, 64, 64, 192), 4, **given)


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("interleaved", (0, 1, 0, 1)), ("zb-v", (0, 1, 1, 0))]
)
@pytest.mark.parametrize("balance", ["flops", "memory"])
def test_the_largest_rank_is_what_counts(schedule, ranks, balance):
    plan = widening(schedule=schedule, balance=balance)
    assert plan.ranks == ranks
    stages = [s.flops if balance == "flops" else s.lasting_bytes for s in plan.stages]
    totals = rank_totals(stages, ranks)
    assert max(totals) == plan.certificate.value
    assert sum(totals) / 2 >= plan.certificate.lower_bound or balance == "memory"
    assert plan.certificate.lower_bound <= plan.certificate.value


def test_a_limit_of_stages_holds():
    free = widening(schedule="zb-v")
    limit = max(stage.memory_bytes for stage in free.stages)
    plan = widening(schedule="zb-v", memory_limit=limit)
    assert plan.assignment == free.assignment
    less = widening(schedule="zb-v", memory_limit=limit - 1, num_micro_batches=None)
    assert max(stage.memory_bytes for stage in less.stages) < limit
