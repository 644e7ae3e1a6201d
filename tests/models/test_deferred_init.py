"""Models that are planned without their weights."""

import resource

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.models.deferred_init import only_shapes
from tests.helpers.commands import Command
from tests.helpers.training import compiled
from tests.zoo import models

pytestmark = pytest.mark.keras

WIDTH = 40_000  # a kernel has 6.4 GB


def huge():
    """A model of 64 GB that is compiled, has a deep chain and values of its own."""
    start = layers.Normalization(mean=np.zeros(WIDTH), variance=np.ones(WIDTH))
    dense, more = [layers.Dense(WIDTH) for _ in range(10)], [layers.ReLU() for _ in range(1100)]
    return compiled(models.chain((WIDTH,), start, *dense, *more), "sgd", "mse")


@pytest.mark.slow
def test_a_model_of_any_size_is_planned(capsys):
    command = Command(capsys)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = tnt.make_plan(
        huge, 5, optimizer="sgd", schedule="1f1b", num_micro_batches=8, balance="memory"
    )
    assert sum(stage.parameter_bytes for stage in plan.stages) == 40 * (WIDTH + 1) * WIDTH
    assert plan.optimizer == "SGD"
    made = command.json(
        "plan", "make", "tests.models.test_deferred_init:huge", "--stages", 5, "--schedule", "1f1b",
        "--micro-batches", 8, "--balance", "memory",
    )  # fmt: skip
    assert made["optimizer"] == "SGD"  # the model's own
    assert made["assignment"] == list(plan.assignment)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2e6, "KiB"


@pytest.mark.parametrize(
    "build",
    [models.batch_norm_cnn, models.causal_attention, models.tied_head, models.masked_recurrent],
)
def test_plans_are_those_of_models_with_weights(build):
    given = {"num_stages": 2, "num_micro_batches": 4, "optimizer": "adam"}
    plain, light = tnt.make_plan(build(), **given), tnt.make_plan(build, **given)
    assert light.assignment == plain.assignment
    assert light.fingerprint == plain.fingerprint
    costs = [[(s.memory_bytes, s.flops) for s in plan.stages] for plan in (plain, light)]
    assert costs[0] == costs[1]


def test_weights_stay_what_they_are_elsewhere():
    with only_shapes():
        layer = layers.Dense(3)
        layer.build((None, 4))
        optimizer = keras.optimizers.SGD(0.5)
    assert float(optimizer.learning_rate) == 0.5
    with pytest.raises(tnt.errors.StaleWeightError):
        layer.get_weights()
    after = layers.Dense(3)
    after.build((None, 4))
    assert np.any(after.get_weights()[0])


def test_plans_inside_a_stateless_scope():
    with keras.StatelessScope(initialize_variables=False):
        plan = tnt.make_plan(models.mlp(), 2, optimizer="sgd")
    assert plan.optimizer == "SGD"


def test_time_is_measured_with_weights():
    plan = tnt.make_plan(models.mlp, 2, balance="time", num_micro_batches=2)
    assert None not in [stage.forward_seconds for stage in plan.stages]  # 0.0 for so little work
