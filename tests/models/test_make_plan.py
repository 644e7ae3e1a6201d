"""What `make_plan` chooses where options are left open."""

from __future__ import annotations

import itertools
import re

import keras
import pytest
from keras import layers

from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.models.make_plan import make_plan
from tarantella_pp.partition.plan.plan_simulation import HardwareSpec, PlanSimulation
from tarantella_pp.partition.visualization import render_html
from tarantella_pp.partition.visualization.step_rows import simulated_step
from tests.helpers import keras_models

pytestmark = pytest.mark.keras

SLOW = HardwareSpec(flops_per_second=1e9, action_seconds=3e-4)
"""So slow that a micro-batch of the towers takes some milliseconds."""


def tower(depth, width=64, activation="relu"):
    x = inputs = keras.Input((width,))
    for _ in range(depth):
        x = layers.Dense(width, activation=activation)(x)
    return keras.Model(inputs, x, name="tower")


def seconds(plan, machine=SLOW):
    simulation = PlanSimulation(plan, machine, plan.schedule, plan.num_micro_batches)
    return simulation.point(simulation.step(), plan.num_replicas).step_seconds


def largest(plan):
    return max(stage.memory_bytes for stage in plan.stages)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [64, 96, 1024])
def test_the_fastest_number_of_micro_batches_is_chosen(num_stages, batch_size):
    model, given = tower(8), {"batch_size": batch_size, "machine": SLOW}
    plan = make_plan(model, num_stages, **given)
    counts = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    others = [make_plan(model, num_stages, **given, num_micro_batches=n) for n in counts]
    assert seconds(plan) == min(map(seconds, others))
    assert 1 < plan.num_micro_batches < batch_size


def test_each_micro_batch_costs_time_of_its_own():
    few, more, most = (
        make_plan(
            tower(8), 4, batch_size=256, machine=HardwareSpec(1e9, action_seconds=overhead)
        ).num_micro_batches
        for overhead in (1.0, 1e-3, 0.0)
    )
    assert few < more < most
    weights = make_plan(
        tower(8), 4, batch_size=256, machine=HardwareSpec(1e9, memory_bandwidth=1e7)
    )
    assert weights.num_micro_batches < most


@pytest.mark.parametrize(("batch_size", "count"), [(30, None), (31, 4), (7, 4), (1, 1)])
def test_micro_batches_of_one_size_are_preferred(batch_size, count):
    plan = make_plan(tower(8), 2, batch_size=batch_size, machine=SLOW)
    if count is None:
        assert batch_size % plan.num_micro_batches == 0
    assert 1 <= plan.num_micro_batches <= batch_size


def test_batch_normalization_sees_some_samples():
    machine = HardwareSpec(1e6, action_seconds=0.0)
    assert make_plan(keras_models.residual_cnn()[0], 2, machine=machine).micro_batch_size == 4
    assert make_plan(tower(4), 2, machine=machine).micro_batch_size == 1


@pytest.mark.parametrize(("num_stages", "share"), [(2, 0.9), (3, 0.9), (3, 0.7)])
def test_under_a_limit_the_fastest_of_the_fewest_recomputing_stages(num_stages, share):
    model = tower(9, activation="gelu")
    given = {"batch_size": 4096, "num_micro_batches": 4, "machine": SLOW}
    free = make_plan(model, num_stages, **given)
    limit = int(share * largest(free))
    found = []
    for size in range(num_stages + 1):
        for stages in itertools.combinations(range(num_stages), size):
            try:
                found.append(
                    make_plan(model, num_stages, **given, memory_limit=limit, recompute=stages)
                )
            except PlanError:
                continue
    plan = make_plan(model, num_stages, **given, memory_limit=limit)
    assert plan.recompute
    assert largest(plan) <= limit
    assert seconds(plan) == min(map(seconds, found))


def test_more_micro_batches_come_before_recomputation_where_they_cost_less():
    model, given = tower(12), {"batch_size": 4096, "machine": HardwareSpec(1e8)}
    limit = int(0.6 * largest(make_plan(model, 2, **given, num_micro_batches=4)))
    plan = make_plan(model, 2, **given, memory_limit=limit)
    assert plan.num_micro_batches > 4
    assert plan.recompute == ()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"balance": "flops"},
        {"num_micro_batches": 4},
        {"num_micro_batches": 4, "recompute": "none"},
        {"recompute": "all", "schedule": "gpipe"},
    ],
)
def test_a_refused_limit_names_the_smallest_that_works(options):
    model, given = tower(9), {"batch_size": 512, **options}
    with pytest.raises(PlanError, match="memory_limit='9kB'") as caught:
        make_plan(model, 3, **given, memory_limit="9kB")
    smallest = int(re.search(r"The smallest .* is (\d+) bytes", str(caught.value))[1])
    plan = make_plan(model, 3, **given, memory_limit=smallest)
    assert largest(plan) <= smallest
    with pytest.raises(PlanError, match=f"memory_limit={smallest - 1000}"):
        make_plan(model, 3, **given, memory_limit=smallest - 1000)


def test_limits_of_unequal_devices_choose_and_refuse():
    model, given = tower(9), {"batch_size": 512}
    free = make_plan(model, 3, **given)
    sizes = [stage.memory_bytes for stage in free.stages]
    limits = [2 * sizes[0], sizes[1] // 2, 2 * sizes[2]]
    plan = make_plan(model, 3, **given, memory_limit=limits)
    pairs = zip(plan.stages, limits, strict=True)
    assert all(stage.memory_bytes <= limit for stage, limit in pairs)
    with pytest.raises(PlanError, match="limit of each of its stages") as caught:
        make_plan(model, 3, **given, memory_limit=["1kB", "9GB", "9GB"])
    found = re.search(r"The smallest one for all stages .* is (\d+) bytes", str(caught.value))
    assert largest(make_plan(model, 3, **given, memory_limit=int(found[1]))) <= int(found[1])


def test_a_refusal_says_what_would_fit():
    model, given = tower(12), {"batch_size": 4096}
    fixed = {"num_micro_batches": 4, "recompute": "none"}
    limit = int(0.5 * largest(make_plan(model, 2, **given, **fixed)))
    with pytest.raises(PlanError, match="Less is needed with") as caught:
        make_plan(model, 2, **given, **fixed, memory_limit=limit)
    text = str(caught.value)
    advice = dict(re.findall(r"(\w+)=(\d+|\(.*?\)) \([^)]*, fits\)", text))
    assert "num_micro_batches" in advice
    for name, value in advice.items():
        stages = int(value) if name == "num_stages" else 2
        changes = {name: None} if name != "num_stages" else {}
        plan = make_plan(model, stages, **{**given, **fixed, **changes}, memory_limit=limit)
        assert largest(plan) <= limit


def test_ranks_are_shared_among_stages_and_replicas():
    model = tower(8)
    given = {"batch_size": 256, "machine": SLOW}
    plan = make_plan(model, num_ranks=8, **given)
    assert plan.num_stages * plan.num_replicas == 8
    shapes = [make_plan(model, n, num_ranks=8, **given) for n in (1, 2, 4, 8)]
    assert [(p.num_stages, p.num_replicas) for p in shapes] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert seconds(plan) == min(map(seconds, shapes))
    slow_links = HardwareSpec(1e9, bandwidth=1e4)  # too slow to sum gradients over replicas
    assert make_plan(model, num_ranks=4, batch_size=256, machine=slow_links).num_replicas < 4
    limit = int(0.4 * largest(shapes[0]))
    assert make_plan(model, num_ranks=8, **given, memory_limit=limit).num_stages > 1


def test_loops_stay_without_recomputation():
    inputs = keras.Input((64, 8))
    x = layers.LSTM(8, return_sequences=True)(inputs)
    for _ in range(6):
        x = layers.Dense(64, activation="gelu")(x)
    model, given = keras.Model(inputs, x), {"batch_size": 256, "num_micro_batches": 4}
    limit = int(0.9 * largest(make_plan(model, 3, **given)))
    plan = make_plan(model, 3, **given, memory_limit=limit)
    assert plan.recompute
    assert plan.assignment[0] not in plan.recompute


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_stages=None"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"num_ranks": 8, "num_stages": 3}, "num_ranks=8, num_stages=3"),
        ({"num_ranks": 8, "num_stages": 2, "num_replicas": 2}, "num_replicas=2"),
        ({"num_stages": 9}, "at most 4"),
        ({"num_stages": 9, "memory_limit": "1GB", "num_micro_batches": 1}, "at most 4"),
        ({"num_stages": 2, "recompute": "some"}, "recompute='some'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_plan(tower(4), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 3, "num_micro_batches": 4},
        {"num_stages": 4, "num_micro_batches": 4, "schedule": "interleaved"},
        {"num_stages": 3, "num_micro_batches": 2, "schedule": "zb-h1"},
        {"num_stages": 2, "num_micro_batches": 4, "schedule": "zb-auto"},
        {"num_stages": 1},
    ],
)
def test_the_bubble_is_one_and_the_same_everywhere(options, tmp_path, capsys):
    dense = [layers.Dense(width) for width in (8, 64, 8, 16, 8)]  # unequal stages
    plan = make_plan(keras.Sequential([keras.Input((8,)), *dense]), **options)
    simulated = simulated_step(plan)
    assert plan.bubble == pytest.approx(simulated.bubble)
    shown = f"{100 * plan.bubble:.1f} %"
    assert f"bubble {shown}." in str(plan)
    assert f"<dt>Bubble</dt><dd>{shown}<" in render_html(plan, timeline=simulated)
    plan.save(tmp_path / "plan.json")
    assert main(["plan", "show", str(tmp_path / "plan.json")]) == 0
    assert main(["simulate", str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert f"bubble {shown}." in told
    assert f"Bubble:     {shown}, " in told
