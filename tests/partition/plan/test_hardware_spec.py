"""Seconds of operations by arithmetic and memory traffic, and machines by name."""

import json

import keras
import msgspec
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.plan.hardware_spec import (
    HardwareSpec,
    NodeWork,
    machine_of,
    node_work,
    roofline_seconds,
)
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, planned_step, stage_seconds
from tests.zoo import models

pytestmark = pytest.mark.keras


def work_of(*stack, shape=(6,), dtype="float32"):
    """Work of layers that are followed by another one, which has the loss."""
    model = models.chain(shape, *stack, layers.Rescaling(2.0), dtype=dtype)
    return node_work(extract(model).graph)[:-1]


def test_what_moves():
    dense, relu = work_of(layers.Dense(4), layers.ReLU())
    assert dense == NodeWork(2 * 6 * 4 + 4, 4 * (6 + 4), 4 * (6 * 4 + 4))
    assert relu == NodeWork(4, 4 * (4 + 4), 0)
    flat = work_of(layers.Dense(4), layers.Flatten(), shape=(3, 6))[1]
    assert flat == NodeWork(0, 0, 0)  # the same memory
    (table,) = work_of(layers.Embedding(1000, 8), shape=(5,), dtype="int32")
    assert table == NodeWork(0, 4 * (2 * 5 + 2 * 5 * 8), 0)  # no more of it than is picked


def both_ways(work, rows, machine):
    """Seconds forward and backward, of which gradients of inputs and of weights take a half."""
    found = roofline_seconds(work, rows, machine)
    assert all(back == weights for _, back, weights in found)
    return [(forward, back + weights) for forward, back, weights in found]


def test_the_longer_of_both_counts():
    work = (NodeWork(100.0, 1.0, 0.0), NodeWork(1.0, 40.0, 80.0))
    assert both_ways(work, 2, HardwareSpec(10.0)) == [(20.0, 40.0), (0.2, 0.4)]
    machine = HardwareSpec(10.0, memory_bandwidth=4.0)
    for rows in (1, 2):
        moved = (rows * 40 + 80) / 4  # weights come anew
        seconds = [(10.0 * rows, 20.0 * rows), (moved, 2 * moved)]
        assert both_ways(work, rows, machine) == seconds
        slow = msgspec.structs.replace(machine, weight_bandwidth=8.0)
        laid_out = [(10.0 * rows, 20.0 * rows), (10 + 10 * rows, 20 + 20 * rows)]
        assert both_ways(work, rows, slow) == laid_out


def test_gradients_that_nobody_needs():
    """Frozen layers have none before the first trained one, adapters small ones."""
    x = keras.Input((4,))
    frozen, adapted, fixed, trained = (layers.Dense(4, use_bias=False) for _ in range(4))
    y = trained(layers.ReLU()(fixed(adapted(frozen(x)))))
    adapted.enable_lora(1)
    frozen.trainable = fixed.trainable = False
    plan = tnt.make_plan(keras.Model(x, y), 4, balance=[1, 1, 1, 2], machine=HardwareSpec())
    needed = [work.needed for work in plan.work]
    assert needed == [(0, 0), (1, 8 / 24), (1, 0), (1, 1), (1, 1)]
    assert [plan.has_backward(stage) for stage in range(4)] == [False, True, True, True]
    step = planned_step(plan)
    assert step.busy_seconds[0] < step.busy_seconds[2]


def test_a_plan_is_played_on_any_machine():
    plan = tnt.make_plan(models.batch_norm_cnn(), 2, machine="v100")
    assert plan.machine == tnt.machines["v100"]
    again = tnt.Plan.from_json(plan.to_json())
    assert again == plan
    rows, core = plan.micro_batch_size, tnt.machines["core"]
    whole = np.sum(roofline_seconds(plan.work, rows, core), axis=0)
    assert np.sum(stage_seconds(again, core, rows), axis=0) == pytest.approx(whole)
    step = PlanSimulation(again, tnt.machines["core"], plan.schedule, plan.num_micro_batches)
    assert step.step().step_seconds > plan.step_seconds
    with pytest.raises(PlanError, match="work must name all"):
        msgspec.structs.replace(plan, work=plan.work[1:])
    of_before = json.loads(plan.to_json())
    for work in of_before["work"]:
        work[3:] = ["product", 0.0, []]
    of_before["machine"]["product"] = None
    read = tnt.Plan.from_json(json.dumps(of_before))
    assert {work.gradients for work in read.work} == {(1.0, 1.0)}
    assert msgspec.structs.replace(read, work=plan.work) == plan


def test_machines_by_name_and_file(tmp_path):
    assert machine_of("V100") is tnt.machines["v100"]
    path = tmp_path / "machine.json"
    mine = HardwareSpec(1e11, bandwidth=None, memory_bandwidth=2e10)
    mine.save(path)
    assert machine_of(path) == machine_of(str(path)) == mine
    old = '{"flops_per_second": 8e10, "memory_bandwidth": 1e10, "weight_bandwidth": null}'
    (tmp_path / "old.json").write_text(old, encoding="utf-8")
    assert machine_of(tmp_path / "old.json") == HardwareSpec(8e10, memory_bandwidth=1e10)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "machine.json: This is no valid machine"),
        ('{"speed": 1}', "speed"),
        ('{"flops_per_second": 0}', "flops_per_second"),
        ('{"latency": -1}', "latency"),
        ('{"memory_bandwidth": 0}', "memory_bandwidth"),
    ],
)
def test_files_without_a_machine_are_refused(tmp_path, text, complaint):
    (tmp_path / "machine.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=complaint):
        machine_of(tmp_path / "machine.json")


@pytest.mark.parametrize("name", ["gpu", "missing.json", 3])
def test_unknown_machines_are_refused(name):
    with pytest.raises(ConfigurationError, match=r"one of core, p40.*Received: machine="):
        tnt.make_plan(models.batch_norm_cnn(), 2, machine=name)
