"""Methods that take all ranks, called by some of them only, or not alike."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, refused, sgd, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

QUIET = {"batch_size": 8, "shuffle": False, "verbose": 0}


def ends_badly():
    yield X[:8], Y[:8]
    yield X[8:16], Y[8:16]
    raise ValueError("a bad apple")


def make_calls_that_differ(folder):
    """Calls that ranks do not make alike; each is refused on all of them, and nothing changes."""
    use_float64()
    keras.utils.set_random_seed(1)
    model = tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2)
    model.compile(sgd(), "mse")
    master = tnt.is_master_rank()
    before = [w.tolist() for w in model.get_weights()]
    zeros = [w * 0.0 for w in model.get_weights()]

    def on_master(call, elsewhere=lambda: model.evaluate(X, Y, verbose=0)):
        return call if master else elsewhere

    def have_callbacks_of_ones_own():
        callbacks = [keras.callbacks.EarlyStopping("loss")] if master else []
        model.fit(X, Y, callbacks=callbacks, **QUIET)

    def compile_with_other_slots():
        plain = mlp()
        plain.compile("adam", "mse")
        plain.fit(X + tnt.get_rank(), Y, **QUIET)
        tnt.PipelineModel(plain, num_stages=2, num_micro_batches=2)

    calls = [
        on_master(lambda: model.save(f"{folder}/model.keras")),
        on_master(lambda: model.reset_metrics()),
        on_master(lambda: model.set_weights(zeros)),
        lambda: model.set_weights([w + float(master) for w in zeros]),
        lambda: model.compile(keras.optimizers.SGD(0.1 if master else 0.2), "mse"),
        have_callbacks_of_ones_own,
        lambda: (model.train_on_batch if master else model.test_on_batch)(X, Y),
        lambda: tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=3 if master else 2),
        on_master(lambda: tnt.barrier(), lambda: model.get_weights()),
        lambda: model.load_weights(f"{own}/w.weights.h5"),
        lambda: model.load_weights(f"{own}/{'w' if master else 'missing'}.weights.h5"),
        lambda: model.load_weights(f"{own}/w.weights.json"),
        compile_with_other_slots,
    ]
    own = Path(folder) / str(tnt.get_rank())
    own.mkdir()
    plain = mlp()
    plain.set_weights([w + tnt.get_rank() for w in plain.get_weights()])
    plain.save_weights(own / "w.weights.h5")
    plain.save_weights(own / "w.weights.json", max_shard_size=1e-3)
    found = [refused(call) for call in calls]
    assert "num_stages='two'" in refused(lambda: tnt.PipelineModel(mlp(), num_stages="two"))
    # That of the reader, or what it tells the others
    found.append(error_of(lambda: model.fit(ends_badly(), steps_per_epoch=4, verbose=0)))
    iterations = int(model.optimizer.iterations)
    model.set_weights([np.array(w) for w in before])
    after = [w.tolist() for w in model.get_weights()]
    history = model.fit(X, Y, epochs=2, **QUIET).history
    # What users write who think of the rank that prints
    save = lambda batch, logs: master and batch == 1 and model.save(f"{folder}/model.keras")  # noqa: E731
    saving = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    in_fit = refused(lambda: model.fit(X, Y, callbacks=saving, **QUIET))
    return found, before == after, iterations, history, in_fit


@pytest.mark.slow
def test_calls_that_differ_are_refused_on_all_ranks(tmp_path):
    run = mpi_run(2, make_calls_that_differ, str(tmp_path), timeout=240, env={"TNT_TIMEOUT": "60"})
    first, second = run.check().results
    for (*texts, data), *_ in (first, second):
        assert texts == first[0][:-1]
        assert "a bad apple" in data
    assert first[1:] == second[1:]
    (*texts, slots, _), unchanged, iterations, history, in_fit = first
    assert "slots of optimizer adam differ between ranks" in slots
    assert iterations == 2
    for text, one, other in zip(
        texts,
        ("evaluate()", "evaluate()", "evaluate()", "set_weights(weights=",
         "compile(optimizer.learning_rate=0.2",
         "fit(callbacks=[])", "test_on_batch()", "PipelineModel(num_micro_batches=2)",
         "get_weights()", "load_weights(contents=", "load_weights(contents='FileNotFoundError'",
         "load_weights(contents="),
        ("save()", "reset_metrics()", "set_weights()", "set_weights(weights=",
         "compile(optimizer.learning_rate=0.1",
         "fit(callbacks=['EarlyStopping'])", "train_on_batch()",
         "PipelineModel(num_micro_batches=3)", "tnt.barrier()", *["load_weights(contents="] * 3),
        strict=True,
    ):  # fmt: skip
        place = r".* at \S*test_calls\.py:\d+ on rank "
        assert re.search(re.escape(one) + place + "0; " + re.escape(other) + place + "1", text)
    assert unchanged
    assert history["loss"][1] < history["loss"][0]
    assert re.search(r"fit\(\) at \S*:\d+, not finished, on rank 0; save\(\) at .* rank 1", in_fit)
    assert not (tmp_path / "model.keras").exists()
