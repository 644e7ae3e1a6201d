"""All callbacks of Keras: what they do to training, and what they write."""

import csv
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
from keras import callbacks

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.exactness.trials import EVENLY, Part, Trial, classes_in
from tests.helpers.training import WEIGHTS, Case, X, Y
from tests.zoo.models import mlp

NOT_TRIED = {
    "Callback": "the base class of all callbacks",
    "CallbackList": "what `fit` makes of several callbacks",
}

Seen = list[Any]


def recorder(seen: Seen) -> keras.callbacks.Callback:
    """Notes what callbacks are told."""
    return callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append([epoch, *map(float, logs.values())]),
        on_train_batch_end=lambda batch, logs: seen.append([batch, *map(float, logs.values())]),
    )


class Loops(callbacks.Callback):
    """Evaluates and predicts several batches of other data in the midst of `fit`."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        logs["predicted"] = self.model.predict(X, batch_size=BATCH, verbose=0).sum()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["evaluated"] = self.model.evaluate(X, Y, batch_size=BATCH, verbose=0)


# Each makes callbacks that write into a folder and note in a list what they see.
MADE: dict[str, Callable[[Path, Seen], Any]] = {
    "BackupAndRestore": lambda folder, seen: callbacks.BackupAndRestore(folder / "backup"),
    "CSVLogger": lambda folder, seen: callbacks.CSVLogger(folder / "log.csv"),
    "EarlyStopping": lambda folder, seen: callbacks.EarlyStopping(
        "loss", min_delta=10.0, restore_best_weights=True
    ),
    "History": lambda folder, seen: callbacks.History(),
    "LambdaCallback": lambda folder, seen: recorder(seen),
    "LearningRateScheduler": lambda folder, seen: callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
    "ModelCheckpoint": lambda folder, seen: callbacks.ModelCheckpoint(
        folder / "new" / "{epoch}.keras"
    ),
    "OrbaxCheckpoint": lambda folder, seen: callbacks.OrbaxCheckpoint(folder / "orbax"),
    "ProgbarLogger": lambda folder, seen: callbacks.ProgbarLogger(),
    "ReduceLROnPlateau": lambda folder, seen: callbacks.ReduceLROnPlateau(
        "loss", factor=0.1, patience=0, min_delta=10.0
    ),
    "RemoteMonitor": lambda folder, seen: callbacks.RemoteMonitor(),
    "SwapEMAWeights": lambda folder, seen: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda folder, seen: callbacks.TensorBoard(
        folder / "board", histogram_freq=1, write_graph=False, update_freq=1
    ),
    "TerminateOnNaN": lambda folder, seen: callbacks.TerminateOnNaN(),
    "ModelCheckpoint(save_weights_only)": lambda folder, seen: callbacks.ModelCheckpoint(
        folder / "{epoch}.weights.h5", save_weights_only=True, save_freq=2
    ),
    "Callback(evaluate, predict)": lambda folder, seen: [Loops(), recorder(seen)],
}
ALONE = ("BackupAndRestore", "OrbaxCheckpoint", "TensorBoard")
BATCH = EVENLY
SAMPLES = 2 * BATCH


def parts() -> list[Part]:
    """All callbacks that Keras has, and more of them."""
    names = dict.fromkeys([*classes_in(callbacks, NOT_TRIED), *MADE])
    return [Part(name, MADE[name], None if name in ALONE else "fit") for name in names]


def trial(parts: Sequence[Part]) -> Trial:
    """Two epochs of `fit` with some callbacks."""

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.Adam(0.05, use_ema=True), "loss": "mse"}

    case = Case(mlp, X[:SAMPLES], Y[:SAMPLES], compiled)
    return Trial(case, Fit([part.value for part in parts]))


class Fit:
    """Trains with callbacks; returns what they did, saw, sent and wrote."""

    def __init__(self, makers: Sequence[Callable[[Path, Seen], Any]]) -> None:
        self._makers = makers

    def __call__(self, model: keras.Model, case: Case) -> dict[str, Any]:
        ranks = world() if isinstance(model, PipelineModel) else Communicator()
        folder = Path(ranks.broadcast_json(tempfile.mkdtemp() if ranks.rank == 0 else None))
        seen: Seen = []
        made = keras.tree.flatten([make(folder, seen) for make in self._makers])
        with mock.patch("requests.post") as post:
            told = model.fit(
                case.x, case.y, sample_weight=WEIGHTS[:SAMPLES], batch_size=BATCH, epochs=2,
                shuffle=False, verbose=0, callbacks=made,
            )  # fmt: skip
        sent = ranks.allgather_json([call.args[1] for call in post.call_args_list])
        found = {
            "history": told.history,
            "seen": seen,
            "sent": [list(json.loads(data["data"]).values()) for part in sent for data in part],
            "weights": [w.tolist() for w in model.get_weights()],
            "rate": float(model.optimizer.learning_rate),
            "files": written(folder),
        }
        ranks.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder)
        return found


def written(folder: Path) -> dict[str, Any]:
    """The numbers in the files of a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".csv":
            with path.open() as lines:
                rows = [[v for v in row.values() if v != "NA"] for row in csv.DictReader(lines)]
                found[name] = [list(map(float, row)) for row in rows]
        elif path.suffix == ".keras":
            weights = keras.saving.load_model(path).get_weights()
            found[name] = [w.tolist() for w in weights]
        elif path.name.endswith(".weights.h5"):
            model = mlp()
            model.load_weights(path)
            found[name] = [w.tolist() for w in model.get_weights()]
    return found
