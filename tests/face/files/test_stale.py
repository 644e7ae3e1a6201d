"""A weight that is trained on another rank is never read with an old value."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import ROUNDING, compiled, distance, integers, use_float64
from tests.zoo.models import mlp, tied_head

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

BATCH = {"batch_size": 8, "verbose": 0}
QUIET = {**BATCH, "shuffle": False}
IDS, X, Y = training.IDS[:16], training.X[:16], training.Y[:16]  # for batches of one size


def told(read):
    """The kind of error that a read ends with; nothing if there is none."""
    return error_of(read).partition(":")[0]


def reading(model, found):
    """Reads all weights after each step and each epoch."""

    def read(when):
        found[when] = error_of(lambda: [layer.get_weights() for layer in model.layers])

    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: read("batch"),
        on_epoch_end=lambda *_, **__: read("epoch"),
    )


def gathering(model, hook):
    """What a reader's error says to put before it."""
    return keras.callbacks.LambdaCallback(**{hook: lambda n, logs=None: model.get_weights()})


def kept_files(model, folder):
    """What Keras' own functions say to a pipeline, and whether older files are still there."""
    found = []
    for save, end in (("save_model", ".keras"), ("save_weights", ".weights.h5")):
        older = Path(folder) / f"older-{world().rank}{end}"
        older.write_bytes(b"older")
        found.append(told(lambda: getattr(keras.saving, save)(model, older)))  # noqa: B023
        found.append(older.read_bytes() == b"older")
    return found


def read_everything(folder):
    use_float64()
    keras.utils.set_random_seed(1)
    plain = mlp()
    model = compiled(PipelineModel(plain, num_stages=2, num_micro_batches=2), "adam", "mse")
    plain.predict(X, verbose=0)  # traced before the weights leave
    other, own = (plain.layers[1:3], plain.layers[3:])[:: 1 if world().rank else -1]
    reads = {
        "layer": lambda: other[0].get_weights(),
        "call": lambda: other[0](np.zeros((1, other[0].kernel.shape[0]))),
        "number": lambda: model.trainable_variables[0 if world().rank else -1].numpy(),
        "operation": lambda: keras.ops.sum(other[0].kernel),
        "model": lambda: keras.Model.get_weights(plain),
        "predict": lambda: plain.predict(X, verbose=0),
        "file": lambda: keras.saving.save_weights(plain, f"{folder}/{world().rank}.weights.h5"),
        "tree": lambda: model.get_state_tree(),
        "slots": lambda: model.optimizer.save_own_variables({}),
        "checkpoint": lambda: tf.train.Checkpoint(model=model).save(f"{folder}/{world().rank}"),
    }
    found = {"start": [told(read) for read in reads.values()]}
    first, then, always = found["readers"] = {}, {}, {}
    before, after = reading(model, first), reading(model, then)
    model.fit(X, Y, callbacks=[before, gathering(model, "on_epoch_end"), after], **QUIET)
    after = reading(model, always)
    model.fit(X, Y, callbacks=[gathering(model, "on_train_batch_end"), after], **QUIET)
    model.fit(X, Y, **QUIET)
    found["trained"] = {name: told(read) for name, read in reads.items()}
    found["kept"] = kept_files(model, folder)
    found["own"] = told(own[0].get_weights)
    found["text"] = repr(other[0].kernel)
    model.summary(print_fn=lambda *_, **__: None)
    model.compile("adam", "mse")  # which makes new stages, and reads no weights
    model.save_weights(f"{folder}/compiled.weights.h5")
    model.fit(X, Y, **QUIET)
    keras.models.clone_model(plain)
    found["shapes"] = [model.count_params(), [list(w.shape) for w in model.weights]]
    model.get_weights()
    found["gathered"] = [told(read) for read in reads.values()]
    found["values"] = [w.tolist() for w in plain.get_weights()]
    model.fit(X, Y, **QUIET)
    model.set_weights([w * 0 for w in model.get_weights()])
    found["set"] = [told(read) for read in reads.values()]
    # A weight that is used here is sent here at each step.
    tied = PipelineModel(tied_head(), num_stages=2, num_micro_batches=2)
    tied.compile("sgd", training.from_logits())
    tied.fit(IDS, integers(6, 5, seed=8)[:16], **QUIET)
    found["tied"] = tied.layers[1].get_weights()[0].tolist()
    found["turns"] = take_turns(lambda model: PipelineModel(model, 2, num_micro_batches=1))
    return found


@pytest.mark.slow
def test_reads_on_the_wrong_rank(tmp_path):
    run = mpi_run(2, read_everything, str(tmp_path), timeout=250).check()
    refused, turns = ["ConfigurationError"] * 3, take_turns(lambda model: model)
    for found in run.results:
        assert distance(turns, found["turns"]) < ROUNDING
        assert found["start"] == [*[""] * 7, *refused]
        first, then, always = found["readers"]
        assert all("Before a callback that reads it put" in first[when] for when in first)
        assert then == {"batch": first["batch"], "epoch": ""}
        assert always == {"batch": "", "epoch": ""}
        kinds = found["trained"]
        assert [kinds.pop(name) for name in ("tree", "slots", "checkpoint")] == refused
        assert set(kinds.values()) == {"StaleWeightError"}, kinds
        assert found["kept"] == ["StaleWeightError", True] * 2
        assert found["own"] == ""
        assert "value=" not in found["text"]
        assert found["shapes"][0] == mlp().count_params()
        assert found["gathered"] == found["set"] == found["start"]
    assert run.results[0]["values"] == run.results[1]["values"]
    assert run.results[0]["tied"] == run.results[1]["tied"]


def take_turns(wrap):
    """What two models with a layer in common tell, which is the last of one and first of one."""
    keras.utils.set_random_seed(1)
    hidden, shared = (keras.layers.Dense(6, activation="tanh") for _ in range(2))
    x, y = keras.Input((6,)), keras.Input((6,))
    plain = keras.Model(x, shared(hidden(x))), keras.Model(y, keras.layers.Dense(6)(shared(y)))
    models = [wrap(model) for model in plain]
    for model in models:
        model.compile("adam", "mse")
    told = []
    for model in (models[0], models[1], models[1], models[0]):
        told += model.fit(X, X, **QUIET).history["loss"]
        told += [other.evaluate(X, X, **BATCH) for other in models[::-1]]
    told.append(float(np.abs(models[1].predict(X, **BATCH)).sum()))
    again = wrap(plain[1])  # begins with the true weights, wherever they are
    again.compile("adam", "mse")
    return [*told, again.evaluate(X, X, **BATCH)]
