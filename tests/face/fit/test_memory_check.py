"""The plan in force is that of the batch that is trained, and stages hold what it says."""

import collections

import keras
import numpy as np
import pytest
from keras import layers, ops

import tarantella_pp as tnt
from tarantella_pp.errors import PlanError
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import compiled, distance, from_logits
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

WORDS, LENGTH, ROWS = 500, 6, 16
OUTPUTS = ROWS * LENGTH * WORDS * 8  # bytes of a batch, in float64
X = np.random.default_rng(0).integers(0, 9, (4 * ROWS, LENGTH))


def language_model():
    table, head = layers.Embedding(9, 4, name="table"), layers.Dense(WORDS, name="head")
    hidden = layers.Dense(4, activation="tanh", name="hidden")
    return chain((LENGTH,), table, hidden, head, dtype="int32")


def pipeline(metrics=None, loss=None, batch_size=ROWS, **options):
    keras.utils.set_random_seed(1)
    model = tnt.PipelineModel(language_model(), 2, 8, batch_size=batch_size, **options)
    return compiled(model, "sgd", loss or from_logits(), metrics=metrics)


def last_stage(model):
    return model.plan.stages[-1].memory_bytes


def error_of_largest(y, p):
    return ops.max(ops.abs(p)) * ops.ones_like(p[:, 0, 0])


def coupled(y, p):
    return ops.mean(ops.square(p), axis=-1) * ops.max(p)


def test_outputs_that_loss_and_metrics_hold_are_in_the_plan():
    bare = tnt.PipelineModel(language_model(), 2, 8, batch_size=ROWS).plan
    without, accurate = pipeline(), pipeline(["accuracy"])
    assert without.plan.stages[0] == bare.stages[0]
    assert last_stage(without) > bare.stages[-1].memory_bytes
    assert last_stage(accurate) - last_stage(without) == OUTPUTS // 8  # of a micro-batch
    whole = pipeline([error_of_largest])
    before = last_stage(whole)
    whole.train_on_batch(X[:ROWS], X[:ROWS])
    assert last_stage(whole) - before > 0.7 * OUTPUTS
    assert "error_of_largest" in whole.plan.outputs.metrics_at_once
    assert "error_of_largest" in str(whole.plan)
    once = pipeline(loss=coupled)
    assert once.plan.outputs.loss_at_once is not None
    assert once.plan.schedule == "gpipe"
    assert last_stage(once) - last_stage(without) > 3 * OUTPUTS
    assert [stage.in_flight for stage in once.plan.stages] == [8, 8]


def test_a_loss_of_all_samples_at_once_has_the_backlog_of_gpipe():
    def skip():
        x = keras.Input((64,))
        y = layers.Add()([layers.Dropout(0.1)(layers.Dense(64)(x)), x])  # sent and not kept
        return keras.Model(x, layers.Dense(10)(layers.Dense(64)(y)))

    stages = []
    for schedule, loss in ((None, coupled), ("gpipe", "mse")):
        model = tnt.PipelineModel(skip(), 2, 16, batch_size=4096, schedule=schedule)
        model.compile("sgd", loss)
        stages.append(model.plan.stages[0].working_bytes)
    assert stages[0] == stages[1]


def test_the_plan_in_force_is_that_of_the_largest_batch_trained():
    model = pipeline()
    model.fit(X[:40], X[:40], batch_size=2 * ROWS, verbose=0)  # and a last one of 8 samples
    assert model.plan.batch_size == 2 * ROWS
    planned = pipeline(batch_size=2 * ROWS)
    assert model.plan.stages == planned.plan.stages
    assert model.plan.cuts == planned.plan.cuts
    again = tnt.PipelineModel(language_model(), plan=tnt.Plan.from_json(model.plan.to_json()))
    again.compile("sgd", model.loss)
    assert again.plan == model.plan  # and counts nothing twice


def train_over_the_limit():
    limit = 2 * last_stage(pipeline(["accuracy"]))
    model = pipeline(["accuracy"], memory_limit=limit)
    before = model.get_weights()
    message = error_of(lambda: model.fit(X, X, batch_size=4 * ROWS, verbose=0))
    unchanged = distance(before, model.get_weights(), "weights") == 0
    model.fit(X, X, batch_size=ROWS, verbose=0)
    return limit, message, unchanged


@pytest.mark.mpi
@pytest.mark.slow
def test_a_batch_over_the_limit_is_refused_by_every_rank_before_it_is_trained():
    for limit, message, unchanged in mpi_run(2, train_over_the_limit, timeout=120).check().results:
        assert message.startswith("PlanError")
        assert f"memory_limit={limit} bytes" in message
        assert f"batch of {4 * ROWS} samples" in message
        assert f"batch_size={4 * ROWS}" in message
        assert unchanged


def test_what_the_loss_holds_is_checked_when_it_is_compiled():
    limit = int(1.2 * last_stage(pipeline()))
    model = pipeline(memory_limit=limit)
    kept = model.loss
    with pytest.raises(PlanError, match=r"coupled.*smaller batch_size and train such batches"):
        model.compile("sgd", coupled)
    assert model.loss is kept
    model.fit(X[:ROWS], X[:ROWS], batch_size=ROWS, verbose=0)


def test_outputs_that_a_metric_needs_at_once_may_be_over_the_limit():
    model = pipeline([error_of_largest], memory_limit=int(1.5 * last_stage(pipeline())))
    with pytest.raises(PlanError, match="error_of_largest"):
        model.fit(X[:ROWS], X[:ROWS], batch_size=ROWS, verbose=0)


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

    hidden = [layers.Dense(16, activation="relu") for _ in range(6)]
    model = chain((16,), *hidden, layers.Dense(1))
    options = {"batch_size": 32, "schedule": schedule, "balance": "flops"}
    whole = tnt.PipelineModel(model, 2, 4, **options)
    wrapped = compiled(tnt.PipelineModel(model, 2, 4, **options, recompute=recompute), "sgd", "mse")
    monkeypatch.setattr(Stage, "forward", noted_forward)
    monkeypatch.setattr(Stage, "backward", noted_backward)
    wrapped.fit(np.ones((32, 16)), np.ones((32, 1)), batch_size=32, verbose=0)
    planned = [stage.activation_bytes_total for stage in wrapped.plan.stages]
    assert [most[stage] for stage in range(2)] == planned
