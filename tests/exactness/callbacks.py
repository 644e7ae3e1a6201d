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


def recorder() -> keras.callbacks.Callback:
    """Notes what callbacks are told, in a list that it has."""
    noted: list[Any] = []
    made = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: noted.append([epoch, *map(float, logs.values())]),
        on_train_batch_end=lambda batch, logs: noted.append([batch, *map(float, logs.values())]),
    )
    made.noted = noted
    return made


class Loops(callbacks.Callback):
    """Evaluates and predicts several batches of other data in the midst of `fit`."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        logs["predicted"] = self.model.predict(X, batch_size=BATCH, verbose=0).sum()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["evaluated"] = self.model.evaluate(X, Y, batch_size=BATCH, verbose=0)


class Measures(callbacks.CSVLogger):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["mean"] = self.model.predict(X, batch_size=BATCH, verbose=0).mean()
        super().on_epoch_end(epoch, logs)


# Each makes callbacks that may write into a folder.
MADE: dict[str, Callable[[Path], Any]] = {
    "BackupAndRestore": lambda folder: callbacks.BackupAndRestore(folder / "backup"),
    "CSVLogger": lambda folder: callbacks.CSVLogger(folder / "log.csv"),
    "CSVLogger(predict)": lambda folder: Measures(folder / "more.csv"),
    "EarlyStopping": lambda _: callbacks.EarlyStopping("loss", 10.0, restore_best_weights=True),
    "History": lambda _: callbacks.History(),
    "LambdaCallback": lambda _: recorder(),
    "LearningRateScheduler": lambda _: callbacks.LearningRateScheduler(lambda _, rate: rate / 2),
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(folder / "new" / "{epoch}.keras"),
    "OrbaxCheckpoint": lambda folder: callbacks.OrbaxCheckpoint(folder / "orbax"),
    "ProgbarLogger": lambda _: callbacks.ProgbarLogger(),
    "ReduceLROnPlateau": lambda _: callbacks.ReduceLROnPlateau("loss", 0.1, 0, min_delta=10.0),
    "RemoteMonitor": lambda _: callbacks.RemoteMonitor(),
    "SwapEMAWeights": lambda _: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda folder: callbacks.TensorBoard(
        folder / "board", histogram_freq=1, write_graph=False, update_freq=1
    ),
    "TerminateOnNaN": lambda _: callbacks.TerminateOnNaN(),
    "ModelCheckpoint(save_weights_only)": lambda folder: callbacks.ModelCheckpoint(
        folder / "{epoch}.weights.h5", save_weights_only=True, save_freq=2
    ),
    "Callback(evaluate, predict)": lambda _: [Loops(), recorder()],
}
ALONE = ("BackupAndRestore", "OrbaxCheckpoint", "TensorBoard")
BATCH = EVENLY
SAMPLES = 2 * BATCH


def parts() -> list[Part]:
    names = dict.fromkeys([*classes_in(callbacks, NOT_TRIED), *MADE])
    return [Part(name, MADE[name], None if name in ALONE else "fit") for name in names]


def trial(parts: Sequence[Part]) -> Trial:

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.Adam(0.05, use_ema=True), "loss": "mse"}

    case = Case(mlp, X[:SAMPLES], Y[:SAMPLES], compiled)
    return Trial(case, Fit([part.value for part in parts]))


class Fit:
    """Trains with callbacks; returns what they did, saw, sent and wrote."""

    def __init__(self, makers: Sequence[Callable[[Path], Any]]) -> None:
        self._makers = makers

    def __call__(self, model: keras.Model, case: Case) -> dict[str, Any]:
        ranks = world() if isinstance(model, PipelineModel) else Communicator()
        folder = Path(ranks.broadcast_json(tempfile.mkdtemp() if ranks.rank == 0 else None))
        made = keras.tree.flatten([make(folder) for make in self._makers])
        with mock.patch("requests.post") as post:
            told = model.fit(
                case.x, case.y, sample_weight=WEIGHTS[:SAMPLES], batch_size=BATCH, epochs=2,
                shuffle=False, verbose=0, callbacks=made,
            )  # fmt: skip
        sent = ranks.allgather_json([call.args[1] for call in post.call_args_list])
        found = {
            "history": told.history,
            "seen": [callback.noted for callback in made if hasattr(callback, "noted")],
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
