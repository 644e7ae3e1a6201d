"""Stages that recompute: the same numbers, dropout included, and less memory."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.stage.stage import Stage

pytestmark = pytest.mark.keras


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
