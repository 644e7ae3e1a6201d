"""Stages that recompute: the same numbers, dropout included, and less memory."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers.training import BATCH, BITS, CASES, EPOCHS, SAMPLES, distance, fitted, make

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


@pytest.mark.slow
def test_recomputation_changes_no_number(monkeypatch):
    name = "dropout, evenly"
    case, shape = CASES[name], {"num_stages": 3, "num_micro_batches": 4, "schedule": "1f1b"}
    free = fitted(make(case, **shape), case)
    found = repeats(monkeypatch)
    assert distance(free, fitted(make(case, **shape, recompute=[0, 1]), case)) < BITS
    steps = SAMPLES // BATCH * EPOCHS
    assert found == {0: 4 * steps, 1: 4 * steps}


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "all"), ("1f1b", [0])])
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


def test_a_stage_with_a_loop_is_refused():
    case = CASES["recurrent"]
    with pytest.raises(ConfigurationError, match="cannot recompute: it has LSTM"):
        fitted(make(case, num_stages=2, recompute="all"), case)
