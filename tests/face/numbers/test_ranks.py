"""Pipelines over MPI ranks: the numbers of one process, work and data where they belong."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.schedule import Schedule
from tests.helpers.mpi import PYTHONS, mpi_run
from tests.helpers.rank_training import ROUNDING, Run, train_and_check
from tests.helpers.training import (
    CASES,
    SAMPLES,
    Case,
    X,
    Y,
    adamw,
    distance,
    finish,
    make,
    refused,
    regression,
    serial,
    sgd,
    use_float64,
)
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi]


TWO = [
    Run("masked_output", 2, 3),
    Run("embedding_adamw", 2, 3, "1f1b"),
    Run("counted", 2, 3),
    Run("dropout", 4, 3, "gpipe"),
    Run("long_skip", 4, 3, "interleaved"),
    Run("two_in_two_out", 4, 3, "zb-v"),
    Run("looked_up_again", 4, 3, "1f1b"),
    Run("merged_windows", 10, 3, "interleaved"),
    Run("long_skip", 2, 4, "1f1b", recompute="all"),
    Run("tied_head", 2, 4, "zb-h1", recompute="all"),
    Run("two_in_two_out", 1, 2, replicas=2),
    Run("masked_output", 1, 2, replicas=2),
    Run("batch_norm", 1, 2, replicas=2),
    Run("class_weight", 1, 8, replicas=2),
    Run("positions", 1, 2, replicas=2),
]
FOUR = [
    Run("long_skip", 4, 3, "gpipe"),
    Run("unreached", 4, 8, "1f1b"),
    Run("frozen", 4, 1, "gpipe"),
    Run("tied_blocks", 4, 3, "zb-h1"),
    Run("tied_head", 4, 8, "1f1b"),
    Run("regularized", 2, 2, "zb-h1", replicas=2),
    Run("tied_head", 2, 2, "1f1b", replicas=2),
    Run("tied_blocks", 4, 2, "interleaved", replicas=2),
    Run("dropout", 2, 2, "1f1b", replicas=2),
    Run("batch_norm", 2, 1, "gpipe", replicas=2),
    Run("embedding_adamw", 1, 3, replicas=4),
    Run("unreached", 2, 8, "zb-h1", replicas=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("ranks", "runs"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_models_on_ranks(ranks, runs, python):
    train_and_check(ranks, runs, python)


def search_and_narrow(folder):
    """Trains with a schedule that is searched for, with one of the user's, and in bfloat16."""
    use_float64()
    found = {}
    model = make(CASES["mlp"], num_stages=4, num_micro_batches=3, schedule="zb-auto")
    found["searched"] = finish(model, CASES["mlp"]).plain()
    found["schedule"] = model.plan.schedule_text
    found["held"] = [stage.in_flight for stage in model.plan.stages]
    model.plan.save(Path(folder) / f"{world().rank}.json")
    again = make(CASES["mlp"], plan=Path(folder) / f"{world().rank}.json")
    found["again"] = finish(again, CASES["mlp"]).plain()
    found["own"] = finish(
        make(CASES["mlp"], schedule=str(Path(folder) / "own")), CASES["mlp"]
    ).plain()
    narrow = make(CASES["mlp"], num_stages=2, num_micro_batches=3, wire_dtype="bfloat16")
    found["narrow"] = finish(narrow, CASES["mlp"]).plain()
    model = make(CASES["mlp"], plan=narrow.plan)
    found["plan's"] = finish(model, CASES["mlp"]).plain(), model.plan.wire_dtype
    return found


OWN = """
schedule: mine
placement: 0 0 1 1
rank 0: 0F0 0F1 1F0 1F1 1B0 1W0 0BW0 1BW1 0BW1 0F2 1F2 1BW2 0BW2
rank 1: 2F0 3F0 3BW0 2BW0 2F1 3F1 3BW1 2BW1 2F2 3F2 3BW2 2BW2
"""


@pytest.mark.slow
def test_schedules_that_are_searched_for_and_the_users_own(tmp_path):
    (tmp_path / "own").write_text(OWN)
    run = mpi_run(2, search_and_narrow, str(tmp_path), timeout=240).check()
    expected = serial("mlp").plain()
    for result in run.results:
        for name in ("searched", "again", "own"):
            assert distance(expected, result[name]) < ROUNDING, name
        assert result["schedule"] == run.results[0]["schedule"]
        schedule = Schedule.from_text(result["schedule"])
        assert (schedule.name, schedule.num_micro_batches) == ("zb-auto", 3)
        assert schedule.placement == (0, 1, 1, 0)
        assert result["held"] == [schedule.in_flight(stage) for stage in range(4)]
        assert 1e-6 < distance(expected, result["narrow"]) < 0.05
        numbers, dtype = result["plan's"]
        assert dtype == "bfloat16"
        assert distance(result["narrow"], numbers) == 0


QUIET = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}


def use_everything(folder):
    """One session of a user, on each rank."""
    use_float64()
    rank, folder = world().rank, Path(folder)
    found = {}
    # Nothing is seeded alike: weights, shuffles and data come from the first rank.
    keras.utils.set_random_seed(rank)
    model = PipelineModel(mlp(), num_stages=4, num_micro_batches=3)
    found["start"] = [w.tolist() for w in model.get_weights()]
    model.compile(adamw(), "mse", metrics=["mae"])
    first = (X, Y) if rank == 0 else (None, None)
    found["before"] = model.evaluate(*first, verbose=0)
    told = model.fit(
        X, Y, batch_size=4, epochs=6, verbose=2, validation_split=0.4,
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0, factor=0.5),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}-{val_mae:.3f}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "last.weights.h5", save_weights_only=True),
        ],
    )  # fmt: skip
    found["history"] = told.history
    found["rate"] = float(model.optimizer.learning_rate)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    found["weights"] = [w.tolist() for w in model.get_weights()]
    found["on"] = model.fit(X, Y, **QUIET).history
    found["predicted"] = model.predict(X, verbose=0).tolist()
    # Back to the file, slots of the optimizer included: the same again.
    model.load_weights(folder / "model.weights.h5")
    found["again"] = model.fit(X, Y, **QUIET).history
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    found["zeros"] = float(np.abs(model.predict(X, verbose=0)).max())
    found["batch"] = [model.train_on_batch(X, Y), model.test_on_batch(X[:2], Y[:2])]
    found["one"] = model.predict_on_batch(X[:1]).tolist()

    def generator():
        if rank:
            raise AssertionError("only the first rank may open the data")
        while True:
            yield X[:8], Y[:8]

    found["generated"] = model.fit(generator(), steps_per_epoch=2, verbose=0).history
    found["refused"] = [
        refused(lambda: model.fit(X, Y, epochs=2 + rank, verbose=0)),
        refused(lambda: (model.evaluate if rank else model.predict)(X, verbose=0)),
        refused(lambda: model(X)),
        refused(lambda: model.save(folder / "model.keras", overwrite=False)),
        refused(lambda: model.compile(clip_some(), "mse")),
    ]
    try:
        model.fit(X, Y[:3], verbose=0)
    except (ValueError, ConfigurationError) as error:
        found["data"] = str(error)
    other = make(Case(mlp, X, Y, regression(optimizer=sgd)), num_stages=2, num_micro_batches=2)
    found["other"] = other.fit(X, Y, **QUIET).history
    return found


def clip_some():
    clipped = keras.optimizers.SGD(global_clipnorm=1.0)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(clipped, {}))


def test_a_session_on_two_ranks(tmp_path):
    run = mpi_run(2, use_everything, str(tmp_path), timeout=240).check()
    first, second = run.results
    for name in first:
        if name not in ("refused", "data"):
            assert first[name] == second[name], name
    assert first["zeros"] == 0
    assert distance(first["on"], first["again"]) == 0
    assert len(first["history"]["loss"]) == 2  # stopped early
    assert first["rate"] < 0.01
    # one rank shows progress, one writes
    assert run.stdout.count("Epoch 1/6") == 1
    with open(tmp_path / "log.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["loss"]) for row in rows] == first["history"]["loss"]
    names = {f"{i + 1}-{mae:.3f}.keras" for i, mae in enumerate(first["history"]["val_mae"])}
    kept = {"log.csv", "last.weights.h5", "model.keras", "model.weights.h5"}
    assert {path.name for path in tmp_path.iterdir()} == names | kept
    for result in run.results:
        epochs, method, call, save, clip = result["refused"]
        assert re.search(
            r"fit\(epochs=2\) at .* on rank 0; fit\(epochs=3\) at .* on rank 1", epochs
        )
        assert re.search(r"predict\(\) at .*py:\d+ on rank 0; evaluate\(\) at .* on rank 1", method)
        assert "2 ranks" in call
        assert "overwrite=False" in save
        assert "global_clipnorm" in clip
        assert "cardinality" in result["data"]
    # plain Keras loads the file and trains on as the ranks did
    stock = keras.saving.load_model(tmp_path / "model.keras")
    assert distance([w.tolist() for w in stock.get_weights()], first["weights"], "weights") == 0
    assert distance(stock.fit(X, Y, **QUIET).history, first["on"]) < ROUNDING
    assert distance(stock.predict(X, verbose=0).tolist(), first["predicted"]) < ROUNDING
    assert int(stock.optimizer.iterations) == 2 * int(np.ceil(0.6 * SAMPLES / 4)) + 3
    other = make(Case(mlp, X, Y, regression(optimizer=sgd))).fit(X, Y, **QUIET).history
    assert distance(other, first["other"]) < ROUNDING
