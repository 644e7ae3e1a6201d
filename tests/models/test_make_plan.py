"""What `make_plan` chooses where options are left open, also within the memory that there is."""

import itertools
import operator
import re
import warnings

import keras
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp import demo
from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.models import agreed_plan
from tarantella_pp.models.make_plan import ACCELERATOR, CORE, default_machine, make_plan
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.page import render_html
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, planned_step
from tarantella_pp.partition.profile import NodeProfile, Profile
from tests.zoo import models

pytestmark = pytest.mark.keras

# So slow that a micro-batch of the towers takes some milliseconds.
SLOW = tnt.HardwareSpec(flops_per_second=1e9, action_seconds=3e-4)


def tower(depth, width=64, activation="relu"):
    steps = [layers.Dense(width, activation=activation) for _ in range(depth)]
    return models.chain((width,), *steps, name="tower")


def seconds(plan, machine=SLOW):
    simulation = PlanSimulation(plan, machine, plan.schedule, plan.num_micro_batches)
    return simulation.point(simulation.step(), plan.num_replicas).step_seconds


def largest(plan):
    return max(stage.memory_bytes for stage in plan.stages)


@pytest.mark.parametrize(("num_stages", "batch_size"), [(2, 64), (4, 96)])
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
            tower(8), 4, batch_size=256, machine=tnt.HardwareSpec(1e9, action_seconds=overhead)
        ).num_micro_batches
        for overhead in (1.0, 1e-3, 0.0)
    )
    assert few < more < most
    weights = make_plan(
        tower(8), 4, batch_size=256, machine=tnt.HardwareSpec(1e9, memory_bandwidth=1e7)
    )
    assert weights.num_micro_batches < most


@pytest.mark.parametrize("batch_size", [30, 31, 7, 1])
def test_micro_batches_of_one_size_are_preferred(batch_size):
    count = make_plan(tower(8), 2, batch_size=batch_size, machine=SLOW).num_micro_batches
    assert batch_size % count == 0 or (batch_size in (7, 31) and 1 <= count <= batch_size)


def test_batch_normalization_sees_some_samples():
    machine = tnt.HardwareSpec(1e6, action_seconds=0.0)
    assert make_plan(models.batch_norm_cnn(), 2, machine=machine).micro_batch_size == 4
    assert make_plan(tower(4), 2, machine=machine).micro_batch_size == 1


@pytest.mark.parametrize(("num_stages", "share"), [(2, 0.9), (3, 0.7)])
def test_under_a_limit_no_recomputing_of_whole_stages_is_faster(num_stages, share):
    model = tower(9, activation="gelu")
    given = {"batch_size": 4096, "num_micro_batches": 16, "machine": SLOW,
             "balance": "memory", "schedule": "gpipe"}  # fmt: skip
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
    assert seconds(plan) <= min(map(seconds, found))


def test_under_a_limit_stages_recompute_where_less_memory_by_other_stages_is_slower():
    x = inputs = keras.Input((32, 64))
    for _ in range(24):
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    model = keras.Model(inputs, x)
    given = {"batch_size": 256, "num_micro_batches": 8, "machine": SLOW}
    limit = int(0.7 * largest(make_plan(model, 4, **given, schedule="1f1b")))
    found = make_plan(model, 4, **given, memory_limit=limit)
    others = make_plan(model, 4, **given, memory_limit=limit, recompute=[])
    assert found.recompute
    assert largest(found) <= limit
    assert seconds(found) < 0.95 * seconds(others)


def test_under_a_limit_ranks_may_hold_less_of_two_stages():
    model = tower(16, activation="gelu")
    machine = tnt.HardwareSpec(1e9, action_seconds=0.0)
    given = {"batch_size": 2048, "num_micro_batches": 8, "machine": machine, "recompute": "none"}
    open_stages = {**given, "num_ranks": 4, "num_replicas": 1}
    needed = largest(make_plan(model, 4, **given))
    assert largest(make_plan(model, 4, **{**given, "recompute": "all"})) < needed
    assert make_plan(model, **open_stages, memory_limit=needed).schedule == "zb-h1"
    for share, schedule in ((0.9, "v-half"), (0.75, "v-min")):
        limit = int(share * needed)
        plan = make_plan(model, **open_stages, memory_limit=limit)
        assert (plan.schedule, plan.num_stages, plan.recompute) == (schedule, 8, ())
        assert max(plan.rank_bytes(4)) <= limit
        assert all(map(operator.le, (s.memory_bytes for s in plan.stages), plan.limits))
        pairs = zip(plan.limits, reversed(plan.limits), strict=True)
        assert all(limit - 2 <= one + other <= limit for one, other in pairs)
        one_stage = make_plan(model, 4, **given, memory_limit=limit)
        assert plan.step_seconds < 0.95 * one_stage.step_seconds


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"num_micro_batches": 4, "recompute": "none"}],
)
def test_a_refused_limit_names_the_smallest_that_works(options):
    model, given = tower(6), {"batch_size": 64, **options}
    with pytest.raises(PlanError, match="memory_limit='9kB'") as caught:
        make_plan(model, 3, **given, memory_limit="9kB")
    if options.get("recompute") == "none":
        assert re.search("Less is needed with .*more stages.*recompute='all'", str(caught.value))
    smallest = int(re.search(r"The smallest .* is (\d+) bytes", str(caught.value))[1])
    plan = make_plan(model, 3, **given, memory_limit=smallest)
    assert largest(plan) <= smallest
    with pytest.raises(PlanError, match=f"memory_limit={smallest - 1000}"):
        make_plan(model, 3, **given, memory_limit=smallest - 1000)


@pytest.mark.slow
def test_ranks_are_shared_among_stages_and_replicas():
    model = tower(8)
    given = {"batch_size": 64, "machine": SLOW}
    plan = make_plan(model, num_ranks=8, **given)
    assert plan.num_stages * plan.num_replicas == 8
    shapes = [make_plan(model, n, num_ranks=8, **given) for n in (1, 2, 4, 8)]
    assert [(p.num_stages, p.num_replicas) for p in shapes] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert seconds(plan) == min(map(seconds, shapes))
    slow_links = tnt.HardwareSpec(1e9, bandwidth=1e4)  # too slow to sum gradients over replicas
    assert make_plan(model, num_ranks=4, batch_size=256, machine=slow_links).num_replicas < 4
    limit = int(0.4 * largest(shapes[0]))
    assert make_plan(model, num_ranks=8, **given, memory_limit=limit).num_stages > 1


def test_over_a_slow_link_more_micro_batches_are_in_flight_where_that_is_worthwhile():
    model = tower(8, width=256)

    def made(bandwidth, **options):
        machine = tnt.HardwareSpec(1e9, bandwidth=bandwidth, split_factor=1.5)  # zb-h1 is no match
        given = {"batch_size": 64, "num_micro_batches": 8, "balance": "flops"}
        return make_plan(model, 2, machine=machine, **{**given, **options})

    eager, usual = made(5e6), made(5e6, schedule="1f1b")
    assert eager.schedule == "eager-1f1b"
    assert eager.step_seconds < 0.95 * usual.step_seconds
    assert made(1e9).schedule == "1f1b"  # slow, and messages are small


def test_shapes_are_those_that_model_and_options_allow():
    model, given = tower(4), {"num_ranks": 4, "machine": SLOW}
    limits = make_plan(model, **given, memory_limit=["1GB", "2GB"])
    assert (limits.num_stages, limits.num_replicas) == (2, 2)
    looping = make_plan(tower(8), num_ranks=2, machine=SLOW, schedule="interleaved")
    assert looping.num_stages // 2 * looping.num_replicas == 2
    assert make_plan(model, **given, recompute=[3]).num_stages == 4
    assert make_plan(model, **given, batch_size=2).num_replicas <= 2
    assert make_plan(models.batch_norm_cnn(), **given, batch_size=8).num_replicas <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"num_ranks": 4, "recompute": [4]}, "from 0 to 3"),
        ({"num_ranks": 10**8, "batch_size": 1}, "at most 4 stages.*num_ranks=1000"),
        ({"num_ranks": 8, "num_stages": 3}, "num_ranks=8, num_stages=3"),
        ({"num_ranks": 8, "num_stages": 2, "num_replicas": 2}, "num_replicas=2"),
        ({"num_stages": 9, "memory_limit": "1GB", "num_micro_batches": 1}, "at most num_stages=4"),
        ({"num_stages": 2, "placement": "anywhere"}, "placement='anywhere'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_plan(tower(4), **options)


def test_the_bubble_is_one_and_the_same_everywhere(tmp_path, capsys):
    dense = [layers.Dense(width) for width in (8, 64, 8, 16, 8)]  # unequal stages
    model = keras.Sequential([keras.Input((8,)), *dense])
    plan = make_plan(model, 4, num_micro_batches=4, schedule="interleaved")
    simulated = planned_step(plan)
    assert plan.bubble == pytest.approx(simulated.bubble_fraction)
    shown = f"{100 * plan.bubble:.1f} %"
    assert f"bubble {shown}." in str(plan)
    assert f"<dt>Bubble</dt><dd>{shown}<" in render_html(plan)
    plan.save(tmp_path / "plan.json")
    assert main(["plan", "show", str(tmp_path / "plan.json")]) == 0
    assert main(["simulate", str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert f"bubble {shown}." in told
    assert f"Bubble:     {shown}, " in told


@pytest.fixture(scope="module")
def resnet():
    return extract(demo.build_model((64, 64, 3)))


def test_the_default_is_the_fastest_plan(resnet):
    given = {"batch_size": 256, "num_micro_batches": 16}
    plan = make_plan(resnet, 4, **given)
    assert plan.balance == "flops"
    others = [
        make_plan(resnet, 4, **given, balance=balance, schedule=schedule)
        for balance in ("memory", "flops")
        for schedule in ("1f1b", "zb-h1")
    ]
    fastest = min(others, key=lambda other: other.step_seconds)
    assert plan.step_seconds == fastest.step_seconds == pytest.approx(seconds(plan, CORE))
    for told in (str(plan), render_html(plan)):
        assert f"A step takes {plan.step_seconds:.3g} s, simulated." in told


def test_a_measured_profile_is_chosen_by(resnet):
    """All the time is spent in the last operations, which arithmetic says nothing of."""
    graph = resnet.graph
    slow = range(len(graph.nodes) - 4, len(graph.nodes))
    nodes = tuple(
        NodeProfile(node.name, (1e-3 * (node.id in slow),), (2e-3 * (node.id in slow),))
        for node in graph.nodes
    )
    profile = Profile("digits", graph.fingerprint(), 1, (8,), nodes)
    given = {"profile": profile, "num_micro_batches": 4, "schedule": "1f1b"}
    plan = make_plan(resnet, 2, **given)
    assert plan.stages[0].seconds is not None
    by_time = make_plan(resnet, 2, **given, balance="time")
    assert plan.balance == "time"
    assert plan.step_seconds == by_time.step_seconds
    assert plan.assignment[-4:] == (0, 0, 1, 1)


def test_loops_and_single_stages_keep_one_f_one_b():
    model = models.chain((8, 4), layers.LSTM(4), layers.Dense(4), layers.Dense(4))
    assert make_plan(model, 3, num_micro_batches=8).schedule == "1f1b"
    assert make_plan(tower(4), 1).schedule == "1f1b"


def test_buckets_are_of_the_threshold():
    for options, counts in (({}, [1, 1]), ({"fusion_threshold": "16KiB"}, [4, 4])):
        assert [len(s.bucket_bytes) for s in make_plan(tower(4), 2, **options).stages] == counts


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("NVIDIA A100-SXM4-80GB", tnt.machines["a100"]),
        ("Tesla P40", tnt.machines["p40"]),
        ("NVIDIA RTX A1000", ACCELERATOR),
        ("Quadro P4000", ACCELERATOR),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name, machine, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda device: {"device_name": name}
    )
    assert default_machine() == machine


LARGE = {"num_stages": 2, "num_micro_batches": 2, "batch_size": 4096, "schedule": "gpipe"}


def planned(monkeypatch, memory, **options):
    monkeypatch.setattr(agreed_plan, "memory_of_each_rank", lambda *_: memory + 24)
    monkeypatch.setattr(agreed_plan, "memory_in_use", lambda: 24)
    return tnt.PipelineModel(models.causal_attention(), **LARGE, **options).plan


def needed(plan):
    return sum(stage.memory_bytes for stage in plan.stages)  # one process has all of them


def test_a_plan_that_does_not_fit_gives_way_to_one_that_does_unless_a_limit_is_given(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = planned(monkeypatch, 1 << 60)
        fitting = planned(monkeypatch, int(1.33 * needed(free)))  # not all of it is for tensors
        assert planned(monkeypatch, 1024, memory_limit="100GB").memory_limit == 10**11
    assert needed(fitting) < needed(free)
    assert fitting.recompute
    assert fitting.memory_limit is None


def test_where_no_plan_fits_a_warning_has_both_numbers_and_what_would(monkeypatch):
    told = r"would need .* memory has 768 B for tensors\. .*The smallest found to work is"
    with pytest.warns(UserWarning, match=told):
        plan = planned(monkeypatch, 1024)
    assert plan.assignment == planned(monkeypatch, 1 << 60).assignment


def test_options_that_do_not_fit_the_ranks_that_are_left_are_open(monkeypatch):
    monkeypatch.setenv("TNT_RESTARTS", "6")
    extracted = extract(tower(8))
    for given in ({"num_stages": 3}, {"num_stages": 2, "num_replicas": 3}, {"num_replicas": 3}):
        assert agreed_plan._on_ranks(PlanOptions(**given), 6, extracted).num_ranks in (None, 6)
        with pytest.warns(UserWarning, match="do not fit the 4 ranks that are left of 6"):
            found = agreed_plan._on_ranks(PlanOptions(**given), 4, extracted)
        assert (found.num_stages, found.num_replicas, found.num_ranks) == (None, None, 4)
    assert agreed_plan._on_ranks(PlanOptions(num_stages=4), 4, extracted).num_stages == 4
    with pytest.raises(ConfigurationError, match="num_stages=3 on 4 ranks"):
        agreed_plan._on_ranks(PlanOptions(num_stages=3, balance=[3, 3, 2]), 4, extracted)
    monkeypatch.delenv("TNT_RESTARTS")
    norm = layers.BatchNormalization(synchronized=True)  # refused where replicas share a batch
    one = extract(keras.Sequential([keras.Input((4,)), norm, layers.Dense(1)]))
    asked = [agreed_plan._on_ranks(PlanOptions(), 2, each) for each in (extracted, one)]
    assert [(o.num_replicas, o.num_micro_batches) for o in asked] == [(None, None), (1, 1)]
    for stages, hint in ((4, "Start 4 ranks"), (2, "num_stages=2 on 3"), (5, "num_stages=5 on 3")):
        with pytest.raises(ConfigurationError, match=hint):
            agreed_plan._on_ranks(PlanOptions(num_stages=stages), 3, extracted)
