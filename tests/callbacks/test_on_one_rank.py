"""Callbacks that report once for the whole job, and see the weights of all ranks."""

import keras
import pytest

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError
from tests.helpers import training
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import begun, distance, sgd, use_float64
from tests.zoo.models import perceptron

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]
X, Y = training.X[:16], training.Y[:16]  # for batches of one size
QUIET = {"batch_size": 8, "shuffle": False, "verbose": 0}


class Reports(keras.callbacks.Callback):
    """Keeps what a tracking service would get: logs, rates, and weights for histograms."""

    kept: list

    def on_train_begin(self, logs=None):
        self.kept = [self.model.optimizer.get_config()["name"]]

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.kept.append([logs["val_mae"], float(self.model.optimizer.learning_rate)])
        self.kept += [w.tolist() for layer in self.model.layers for w in layer.get_weights()]

    def on_test_end(self, logs=None):
        self.kept.append(logs["mae"])


class Does(keras.callbacks.Callback):
    """Does at the end of an epoch what all ranks must do."""

    def __init__(self, what):
        super().__init__()
        self.on_epoch_end = lambda *args: what(self.model)


def reported(*callbacks, wrap=None):
    model = begun(perceptron, wrap, sgd(), "mse", metrics=["mae"])
    model.fit(X, Y, epochs=2, validation_data=(X[:8], Y[:8]), callbacks=callbacks, **QUIET)
    return model


def on_ranks(folder):
    use_float64()
    one = tnt.callbacks.OnOneRank(Reports)
    model = reported(one, wrap=lambda model: tnt.PipelineModel(model, 2, num_micro_batches=2))
    made = getattr(one.callback, "kept", None)

    def told(callback):
        callbacks = [tnt.callbacks.OnOneRank(callback)]
        found = error_of(lambda: model.fit(X, Y, callbacks=callbacks, **QUIET))
        model.stop_training = False
        return found

    texts = [
        told(Does(lambda model: setattr(model, "stop_training", True))),
        told(Does(lambda model: setattr(model.optimizer, "learning_rate", 0.001))),
        told(Does(lambda model: model.save(f"{folder}/none.keras"))),
        told(keras.callbacks.EarlyStopping("loss")),
        told(Does(lambda model: 1 / 0)),
    ]
    changing = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs.update(loss=7))
    after = model.fit(X, Y, callbacks=[tnt.callbacks.OnOneRank(changing)], **QUIET).history["loss"]
    return made, texts, after


@pytest.mark.slow
@pytest.mark.mpi
def test_reports_are_those_of_one_process(tmp_path):
    expected = Reports()
    reported(expected)
    whole = tnt.callbacks.OnOneRank(Reports())
    reported(whole)  # of plain Keras, in one process
    assert distance(whole.callback.kept[1:], expected.kept[1:]) == 0
    first, last = mpi_run(2, on_ranks, str(tmp_path), timeout=240).check().results
    assert first[0] is None
    assert distance(last[0][1:], expected.kept[1:]) < 1e-10
    assert first[2] == last[2]
    for of_first, of_last in zip(first[1], last[1], strict=True):
        assert "ConfigurationError" in of_first or "ZeroDivisionError" in of_first
        assert of_last
    names = "stop_training", "sets the learning rate", "calls save()", "EarlyStopping", "division"
    for name, text in zip(names, last[1], strict=True):
        assert name in text


def test_what_is_no_callback_is_refused():
    for wrong in (7, lambda: 7):
        with pytest.raises(ConfigurationError, match="callback=7"):
            tnt.callbacks.OnOneRank(wrong)
