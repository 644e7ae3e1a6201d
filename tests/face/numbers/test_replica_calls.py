"""What users call on replicas: kinds of data, callbacks, files; with the numbers of plain Keras."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.helpers.training import LABELS, WEIGHTS, X, adamw, distance, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

ROUNDING = 1e-10
QUIET = {"verbose": 0}
BATCHES = [(X[i : i + 5], LABELS[i : i + 5], WEIGHTS[i : i + 5]) for i in range(0, len(X), 5)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[index]


def generated():
    while True:
        yield from BATCHES


class Seen(keras.callbacks.Callback):
    """What a callback sees of each batch and epoch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({"batch": batch, **logs})

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append({"epoch": epoch, **logs})


def train(wrap, folder):
    """Does what users do; returns all numbers that come of it."""
    found = {}
    dataset = tf.data.Dataset.from_tensor_slices((X, LABELS, WEIGHTS)).batch(5)
    model = compiled(wrap)
    found["dataset"] = model.fit(dataset, epochs=2, **QUIET).history
    found["generator"] = model.fit(generated(), steps_per_epoch=3, **QUIET).history
    found["sequence"] = model.fit(Batches(), shuffle=False, **QUIET).history
    found["shuffled"] = model.fit(dataset.shuffle(22, seed=3), **QUIET).history
    found["split"] = model.fit(
        X, LABELS, batch_size=4, epochs=2, validation_split=0.3, shuffle=False,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5}, **QUIET,
    ).history  # fmt: skip
    found["on_batch"] = [
        model.train_on_batch(X[:5], LABELS[:5]),
        model.test_on_batch(X[5:6], LABELS[5:6]),
        model.predict_on_batch(X[:3]).tolist(),
    ]
    found["few"] = [model.predict(X[:n], **QUIET).tolist() for n in (1, 2, 3)]
    found["dataset predicted"] = model.predict(dataset.map(lambda x, y, w: x), **QUIET).tolist()
    found["evaluated"] = model.evaluate(dataset, return_dict=True, **QUIET)
    model.save(f"{folder}/m.keras")
    found.update(continued(wrap, model, folder))
    return found


def compiled(wrap):
    keras.utils.set_random_seed(1)
    model = wrap(keras.Sequential([mlp(), keras.layers.Softmax()]))
    model.compile(
        adamw(),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )
    return model


def continued(wrap, model, folder):
    """Callbacks, and training that goes on from a file."""
    seen = Seen()
    callbacks = [
        keras.callbacks.EarlyStopping("loss", min_delta=1.0, patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=1.0, patience=1),
        keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", "loss", save_best_only=True),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        seen,
    ]
    again = wrap(keras.saving.load_model(f"{folder}/m.keras"))
    histories = []
    for each in (model, again):
        each.fit(X, LABELS, batch_size=8, shuffle=False, **QUIET)
        histories.append([w.tolist() for w in each.get_weights()])
    stopped = again.fit(
        X, LABELS, batch_size=8, epochs=9, shuffle=False, callbacks=callbacks, **QUIET
    ).history
    stopped["learning_rate"] = [float(rate) for rate in stopped["learning_rate"]]
    return {
        "resumed": histories[0],
        "stopped": stopped,
        "seen": [{k: float(v) for k, v in logs.items()} for logs in seen.logs],
        "weights": [w.tolist() for w in again.get_weights()],
        "same": distance(*histories, "weights") < 1e-13,
    }


def on_ranks(folder, stages):
    use_float64()
    found = train(
        lambda model: tnt.PipelineModel(model, num_stages=stages, num_micro_batches=2), folder
    )
    model = compiled(lambda model: tnt.PipelineModel(model, num_stages=stages))
    trace = tnt.callbacks.Timeline(f"{folder}/trace.json")
    model.fit(X, LABELS, batch_size=8, callbacks=[trace], **QUIET)
    return json.loads(json.dumps(found))


@pytest.mark.slow
def test_replicas_do_what_plain_keras_does(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "ranks").mkdir()
    run = mpi_run(2, on_ranks, str(tmp_path / "ranks"), 1, timeout=300).check()
    plain = train(lambda model: model, tmp_path / "plain")
    assert plain.pop("same")
    for result in run.results:
        assert result == run.results[0]
        assert result["same"]
        for name, numbers in plain.items():
            assert distance(numbers, result[name], "weights") < ROUNDING, name
    saved = [keras.saving.load_model(tmp_path / side / "best.keras") for side in ("plain", "ranks")]
    weights = [[w.tolist() for w in model.get_weights()] for model in saved]
    assert distance(*weights, "weights") < ROUNDING
    logs = [rows(tmp_path / side / "log.csv") for side in ("plain", "ranks")]
    assert distance(*logs) < ROUNDING
    events = json.loads((tmp_path / "ranks" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def rows(path: Path) -> list[list[float]]:
    with path.open() as file:
        # Keras writes NA for what the last epoch before a stop does not log.
        return [
            [0.0 if v == "NA" else float(v) for v in row.values()] for row in csv.DictReader(file)
        ]
