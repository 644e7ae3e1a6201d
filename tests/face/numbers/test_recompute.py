"""Stages that recompute: the same numbers, dropout included, and less memory."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.schedule import Schedule
from tests.helpers.training import (
    CASES,
    distance,
    finish,
    make,
    serial,
)

pytestmark = pytest.mark.keras


def train(case, **options):
    return finish(make(case, **options), case)


@functools.cache
def plain(name):
    """What three stages that recompute nothing give; the schedule changes no bits."""
    return train(CASES[name], num_stages=3, num_micro_batches=2, schedule="1f1b")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("dropout", "zb-h1"),
        pytest.param("causal_attention", "1f1b", marks=pytest.mark.slow),
        pytest.param("batch_norm", "zb-h1", marks=pytest.mark.slow),
        pytest.param("regularized", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_no_number(name, schedule):
    options = {"num_stages": 3, "num_micro_batches": 2, "schedule": schedule}
    assert distance(plain(name), train(CASES[name], **options, recompute="all")) < 1e-13


@pytest.mark.parametrize("name", ["dropout", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_micro_batches_that_repeat_nothing_and_others_give_the_same(name):
    order = "0F0 1F0 1BW0 0F1 0F2 1F1 1F2 1BW1 1BW2 0BW0 0BW1 0BW2"
    given = {"num_stages": 2, "num_micro_batches": 3}
    free = train(CASES[name], **given, schedule="1f1b")
    schedule = Schedule.from_text(f"rank 0: {order}")
    model = make(CASES[name], **given, schedule=schedule, recompute="all")
    assert distance(free, finish(model, CASES[name])) < 1e-13
    stages = model._engine.stages
    assert [len(stages[i]._used) for i in (0, 1)] == [1, 2]


@pytest.mark.slow
def test_one_micro_batch_that_recomputes_equals_plain_keras():
    found = train(CASES["batch_norm"], num_stages=2, num_micro_batches=1, recompute="all")
    assert distance(serial("batch_norm"), found) < 1e-10


def test_only_inputs_are_kept_and_the_plan_says_how_much():
    """What the traced stages keep is what the plan counts, with and without recomputation."""
    kept = {}
    for recompute in ("none", (0,), (0, 1)):
        x = inputs = keras.Input((16,))
        for seed in range(6):
            x = layers.Dense(16, activation="relu")(x)
            x = layers.Dropout(0.5, seed=seed)(x)
        model = PipelineModel(
            keras.Model(inputs, layers.Dense(1)(x)), 2, 2, batch_size=16, recompute=recompute
        )
        model.compile("sgd", "mse")
        model.fit(np.ones((16, 16)), np.ones((16, 1)), batch_size=16, verbose=0)
        stages = model._engine.stages
        kept[recompute] = [stages[i].residual_bytes for i in (0, 1)]
        planned = [stage.activation_bytes for stage in model.plan.stages]
        if recompute == (0, 1):  # every micro-batch comes back at once
            planned[1] += model.plan.stages[1].recomputed_bytes
        states = [24 * 8, 24 * 8]  # of random number generators, at most
        for real, count, more in zip(kept[recompute], planned, states, strict=True):
            assert count <= real <= count + more
    assert kept[0,][0] < kept["none"][0] / 4
    assert kept[0, 1] == kept[0,]  # the last stage repeats nothing


def test_the_limit_decides_which_stages_recompute():
    x = inputs = keras.Input((64,))
    for _ in range(12):
        x = layers.Dense(64, activation="relu")(x)
    model = keras.Model(inputs, x)
    options = {"num_stages": 2, "num_micro_batches": 4, "batch_size": 4096, "schedule": "1f1b"}
    options["balance"] = "memory"  # others have room for all that is kept
    free = PipelineModel(model, **options)
    assert free.plan.recompute == ()
    limit = int(0.95 * max(stage.memory_bytes for stage in free.plan.stages))
    bound = PipelineModel(model, **options, memory_limit=limit)
    assert bound.plan.recompute == (0,)
    assert max(stage.memory_bytes for stage in bound.plan.stages) <= limit


def test_a_stage_with_a_loop_is_refused():
    case = CASES["recurrent"]
    with pytest.raises(ConfigurationError, match="cannot recompute: it has LSTM"):
        train(case, num_stages=2, recompute="all")
