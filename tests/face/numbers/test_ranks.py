"""Pipelines over MPI ranks: the numbers of one process, work and data where they belong."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tarantella_pp.runtime.batch import batch_shares
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.schedule import V_SHAPED, Schedule
from tests.helpers import training
from tests.helpers.files import error_of, refused
from tests.helpers.mpi import PYTHONS, mpi_run
from tests.helpers.training import CASES, ROUNDING, X, Y, compiled, distance, fitted, make
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi]


class Run(NamedTuple):
    """A case on ranks, and how they share it."""

    name: str
    stages: int
    micro_batches: int  # of a replica
    schedule: str | None = None
    replicas: int = 1
    recompute: str | None = None


TWO = [
    Run("counted, evenly", 2, 4),
    Run("half_in_training", 2, 3),
    Run("adapted, evenly", 4, 1, "gpipe"),
    Run("two_in_two_out", 4, 3, "zb-v"),
    Run("unreached, evenly", 4, 8, "v-half"),
    Run("merged_windows, evenly", 6, 2, "1f1b"),
    Run("tied_head, evenly", 2, 4, "zb-h1", recompute="all"),
    Run("batch_norm, evenly", 1, 2, replicas=2, recompute="all"),
    Run("positions", 1, 2, replicas=2),
]
FOUR = [
    Run("long_skip, evenly", 4, 4, "gpipe"),
    Run("tied_blocks, evenly", 4, 2, "interleaved", replicas=2),
    Run("dropout, evenly", 2, 2, "1f1b", replicas=2, recompute="all"),
]


def train_runs(runs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Trains on this rank; returns outcomes, stage and rows of each forward pass, and slots.

    A last one says whether an R has run.
    """
    training.use_float64()
    ran: list[list[int]] = []
    forward = Stage.forward

    def counted(self: Stage, key: int, inputs: Sequence[Any], *rest: Any, **options: Any) -> Any:
        rows = next(int(tensor.shape[0]) for tensor in inputs if len(tensor.shape))
        ran.append([self.boundary.index, rows])
        return forward(self, key, inputs, *rest, **options)

    def repeated(self: Stage, key: int) -> None:
        again.append(key)
        return repeat(self, key)

    repeat, again = Stage.repeat, list[int]()
    Stage.forward, Stage.repeat = counted, repeated
    found = []
    for name, stages, micro_batches, schedule, replicas, recompute in runs:
        ran.clear()
        again.clear()
        model = make(
            CASES[name], num_stages=stages, num_micro_batches=micro_batches, schedule=schedule,
            num_replicas=replicas, recompute=recompute, memory_limit=recompute and "1TB",
        )  # fmt: skip
        outcome = training.trained(model, name)
        slots = [v.path for v in model.optimizer.variables if len(v.shape)]
        found.append([outcome, list(ran), slots, bool(again)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("ranks", "runs"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_models_on_ranks(ranks, runs, python):
    """The numbers of one process; each rank's work and slots are its own."""
    env = {"TNT_PROGRESS": "1"}  # messages move on while ranks compute, as between hosts
    launched = mpi_run(ranks, train_runs, runs, timeout=400, env=env, python=python).check()
    for run, results in zip(runs, zip(*launched.results, strict=True), strict=True):
        outcomes, ran, slots, again = zip(*results, strict=True)
        assert all(outcome == outcomes[0] for outcome in outcomes), run
        check_numbers(outcomes[0], run.name, run.micro_batches * run.replicas)
        check_work(run, ran)
        # Ranks that recompute and wait for gradients do so while they wait.
        assert any(again) == (run.recompute is not None and ranks > run.replicas), run
        # The ranks of a pipeline share the slots; each replica has all of them.
        size = ranks // run.replicas
        for first in range(0, ranks, size):
            own = [slot for part in slots[first : first + size] for slot in part]
            assert len(own) == len(set(own)) == count_of_slots(run.name), run


def check_numbers(outcome: dict[str, Any], name: str, micro_batches: int) -> None:
    """Compares what comes of a case with one process."""
    if CASES[name].batch_statistics:
        one_stage = training.trained(make(CASES[name], num_micro_batches=micro_batches), name)
        assert distance(one_stage, outcome) < training.BITS, name
    else:
        limit = training.BITS if micro_batches == 1 else ROUNDING
        assert distance(training.trained(make(CASES[name]), name), outcome) < limit, name


def check_work(run: Run, ran: Sequence[list[list[int]]]) -> None:
    """Each rank runs its stages, and of each batch the samples of its replica."""
    size = len(ran) // run.replicas
    for rank, forwards in enumerate(ran):
        replica, position = divmod(rank, size)
        own = set(range(position, run.stages, size))
        if run.schedule in V_SHAPED:
            own = {position, run.stages - 1 - position}
        samples = len(keras.tree.flatten(CASES[run.name].x)[0])
        rows = [min(training.BATCH, samples - first) for first in range(0, samples, training.BATCH)]
        shares = [batch_shares(n, run.micro_batches, run.replicas)[replica] for n in rows]
        sizes = training.EPOCHS * [n for share in shares for n in share.own_sizes]
        if run.name.startswith("dropout") and run.replicas > 1:  # one shows how much each draws
            sizes.append(shares[0].own_sizes[0])
        expected = sorted([stage, n] for stage in own for n in sizes)
        if run.name.startswith("merged_windows"):  # whose rows are windows in some stages
            forwards, expected = ([stage for stage, _ in each] for each in (forwards, expected))
        assert sorted(forwards) == expected, (run, rank)


def count_of_slots(name: str) -> int:
    """The slots that plain Keras has."""
    model = make(CASES[name])
    model.optimizer.build(model.trainable_variables)
    return sum(len(v.shape) > 0 for v in model.optimizer.variables)


MLP = training.Case(mlp, X[:18], Y[:18], training.regression(), batch=6)
"""Cut into three micro-batches of one size."""


def search_and_narrow(folder):
    """Trains with a schedule that is searched for, with one of the user's, and in bfloat16."""
    training.use_float64()
    found = {}
    options = {"schedule": "zb-auto", "recompute": "all", "memory_limit": "1TB"}
    model = make(MLP, num_stages=4, num_micro_batches=3, **options)
    found["searched"] = fitted(model, MLP)
    found["schedule"] = model.plan.schedule_text
    found["held"] = [stage.in_flight for stage in model.plan.stages]
    model.plan.save(Path(folder) / f"{world().rank}.json")
    again = make(MLP, plan=Path(folder) / f"{world().rank}.json")
    found["again"] = fitted(again, MLP)
    found["own"] = fitted(make(MLP, schedule=str(Path(folder) / "own"), recompute="all"), MLP)
    plan = tnt.make_plan(mlp, 2, num_micro_batches=3, num_ranks=2, wire_dtype="bfloat16")
    found["narrow"] = fitted(make(MLP, plan=plan), MLP)
    found["set free"] = fitted(set_free_late(), MLP)
    return found


def set_free_late():
    """A pipeline whose layers are frozen when it is compiled, and no longer when it trains."""
    keras.utils.set_random_seed(1)
    whole = mlp()
    for layer in whole.layers[1:3]:
        layer.trainable = False
    model = compiled(tnt.PipelineModel(whole, num_stages=2, num_micro_batches=3), **MLP.compiled())
    for layer in whole.layers:
        layer.trainable = True
    return model


OWN = """
schedule: mine
placement: 0 0 1 1
rank 0: 0F0 0F1 1F0 1F1 1R1 1R0 1B0 1W0 0R0 0BW0 1BW1 0BW1 0F2 1F2 1BW2 0BW2
rank 1: 2F0 2R0 3F0 3BW0 2BW0 2F1 3F1 3BW1 2BW1 2F2 3F2 3BW2 2BW2
"""


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_schedules_that_are_searched_for_and_the_users_own(tmp_path):
    (tmp_path / "own").write_text(OWN)
    run = mpi_run(2, search_and_narrow, str(tmp_path), timeout=240).check()
    expected = fitted(make(MLP), MLP)
    for result in run.results:
        for name in ("searched", "again", "own", "set free"):
            assert distance(expected, result[name]) < ROUNDING, name
        assert result["schedule"] == run.results[0]["schedule"]
        schedule = Schedule.from_text(result["schedule"])
        assert (schedule.name, schedule.num_micro_batches) == ("zb-auto", 3)
        assert schedule.repeated
        assert schedule.placement == (0, 1, 1, 0)
        assert result["held"] == list(schedule.held)
        assert 1e-6 < distance(expected, result["narrow"]) < 0.05


QUIET = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}


def use_everything(folder):
    """One session of a user, on each rank."""
    training.use_float64()
    rank, folder = world().rank, Path(folder)
    found = {}
    # Nothing is seeded alike: weights, shuffles and data come from the first rank.
    keras.utils.set_random_seed(rank)
    model = tnt.PipelineModel(mlp(), num_stages=4, num_micro_batches=3)
    found["start"] = [w.tolist() for w in model.get_weights()]
    model.compile(training.adamw(), "mse", metrics=["mae"])
    first = (X, Y) if rank == 0 else (None, None)
    found["before"] = model.evaluate(*first, verbose=0)
    told = model.fit(X, Y, batch_size=4, epochs=2, verbose=2, validation_split=0.4)
    found["history"] = told.history
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

    def generator():
        if rank:
            raise AssertionError("only the first rank may open the data")
        while True:
            yield X[:8], Y[:8]

    found["generated"] = model.fit(generator(), steps_per_epoch=2, verbose=0).history
    clipped = keras.optimizers.OptimizerMap(keras.optimizers.SGD(global_clipnorm=1.0), {})
    found["refused"] = [
        refused(lambda: model.fit(X, Y, epochs=2 + rank, verbose=0)),
        refused(lambda: (model.evaluate if rank else model.predict)(X, verbose=0)),
        refused(lambda: model(X)),
        refused(lambda: model.save(folder / "model.keras", overwrite=False)),
        refused(lambda: model.compile(keras.optimizers.MultiOptimizer(clipped), "mse")),
    ]
    found["data"] = error_of(lambda: model.fit(X, Y[:3], verbose=0))
    # As users write who think of the rank that prints; no call is possible after it
    saves = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rank and model.save(folder / "never.keras")
    )
    found["in fit"] = refused(lambda: model.fit(X, Y, callbacks=saves, **QUIET))
    return found


@pytest.mark.slow
def test_a_session_on_two_ranks(tmp_path):
    run = mpi_run(2, use_everything, str(tmp_path), timeout=240).check()
    first, second = run.results
    for name in first:
        if name not in ("refused", "data"):
            assert first[name] == second[name], name
    assert first["zeros"] == 0
    assert distance(first["on"], first["again"]) == 0
    assert run.stdout.count("Epoch 1/2") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.keras", "model.weights.h5"}
    for result in run.results:
        epochs, method, call, save, clip = result["refused"]
        assert re.search(r"fit\(epochs=2\) at .* rank 0; fit\(epochs=3\) at .* rank 1", epochs)
        assert re.search(r"predict\(\) at .*py:\d+ on rank 0; evaluate\(\) at .* on rank 1", method)
        assert "2 ranks" in call
        assert "overwrite=False" in save
        assert "global_clipnorm" in clip
        assert "cardinality" in result["data"]
        told = r"fit\(\) at \S*:\d+, not finished, .*on rank 0; save\(\) at .* rank 1"
        assert re.search(told, result["in fit"])
    # plain Keras loads the file and trains on as the ranks did
    stock = keras.saving.load_model(tmp_path / "model.keras")
    assert distance([w.tolist() for w in stock.get_weights()], first["weights"], "weights") == 0
    assert distance(stock.fit(X, Y, **QUIET).history, first["on"]) < ROUNDING
    assert distance(stock.predict(X, verbose=0).tolist(), first["predicted"]) < ROUNDING
    assert int(stock.optimizer.iterations) == 2 * int(np.ceil(0.6 * training.SAMPLES / 4)) + 3
