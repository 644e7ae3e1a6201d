"""Stages that recompute: the same numbers, dropout included, and less memory."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers.training import BATCH, CASES, EPOCHS, SAMPLES, distance, finish, make, piped

pytestmark = pytest.mark.keras


def repeats(monkeypatch):
    """Counts the micro-batches that stages run with passes that repeat the forward pass."""
    found = collections.Counter()
    forward = Stage.forward

    def counted(stage, key, *given, **options):
        results = forward(stage, key, *given, **options)
        if stage._repeating is not None and stage._running[key] in stage._repeating:
            found[stage.boundary.index] += 1
        return results

    monkeypatch.setattr(Stage, "forward", counted)
    return found


@pytest.mark.parametrize(
    ("name", "schedule", "recompute", "repeated"),
    [
        pytest.param("causal_attention", "gpipe", "all", [4, 4, 3], marks=pytest.mark.slow),
        pytest.param("regularized", "gpipe", [0, 1], [4, 4, 0], marks=pytest.mark.slow),
        ("dropout", "1f1b", [0, 1], [4, 4, 0]),
        pytest.param("batch_norm", "zb-h1", "all", [4, 4, 0], marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_no_number(name, schedule, recompute, repeated, monkeypatch):
    shape = {"num_stages": 3, "num_micro_batches": 4}
    case, free = CASES[name], piped(name, 3, 4, "1f1b")  # the schedule changes no bits
    found = repeats(monkeypatch)
    model = make(case, **shape, schedule=schedule, recompute=recompute)
    assert distance(free, finish(model, case)) < 1e-13
    steps = -(-SAMPLES // BATCH) * EPOCHS
    assert [found[stage] for stage in range(3)] == [steps * count for count in repeated]


@pytest.mark.parametrize("recompute", ["all", [0]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_hold_at_the_most_what_the_plan_says(schedule, recompute, monkeypatch):
    held, most = collections.defaultdict(dict), collections.Counter()
    forward, backward = Stage.forward, Stage.backward

    def note(stage, key, size):
        index = stage.boundary.index
        held[index][key] = size
        most[index] = max(most[index], sum(held[index].values()))

    def noted_forward(stage, key, *given, **options):
        results = forward(stage, key, *given, **options)
        note(stage, key, stage._running[key].residual_bytes)
        return results

    def noted_backward(stage, key, seeds):
        plan = whole.plan.stages[stage.boundary.index]
        note(stage, key, max(plan.activation_bytes, held[stage.boundary.index][key]))
        results = backward(stage, key, seeds)
        del held[stage.boundary.index][key]
        return results

    x = inputs = keras.Input((16,))
    for _ in range(6):
        x = layers.Dense(16, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    options = {"batch_size": 32, "schedule": schedule, "balance": "flops"}
    whole = PipelineModel(model, 2, 4, **options)
    wrapped = PipelineModel(model, 2, 4, **options, recompute=recompute)
    wrapped.compile("sgd", "mse")
    monkeypatch.setattr(Stage, "forward", noted_forward)
    monkeypatch.setattr(Stage, "backward", noted_backward)
    wrapped.fit(np.ones((32, 16)), np.ones((32, 1)), batch_size=32, verbose=0)
    planned = [stage.activation_bytes_total for stage in wrapped.plan.stages]
    assert [most[stage] for stage in range(2)] == planned


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
        finish(make(case, num_stages=2, recompute="all"), case)
