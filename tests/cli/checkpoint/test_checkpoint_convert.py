"""`tarantella checkpoint show | convert`, on checkpoints of a small model."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError

pytestmark = pytest.mark.keras

X, Y = np.random.default_rng(0).normal(size=(2, 12, 3)).astype("float32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    keras.utils.set_random_seed(1)
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    model = tnt.PipelineModel(plain, num_stages=2, num_micro_batches=1)
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    own = tnt.callbacks.Checkpoint(directory, every=2)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[own])
    return directory, model


def test_a_file_of_plain_keras_goes_on_like_the_model(trained, tmp_path, capsys):
    directory, model = trained
    file = tmp_path / "model.keras"
    assert main(["checkpoint", "convert", str(directory), str(file)]) == 0
    assert "2 epochs" in capsys.readouterr().out
    plain = keras.saving.load_model(file)
    pairs = zip(plain.optimizer.variables, model.optimizer.variables, strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert all(map(np.array_equal, plain.get_weights(), model.get_weights()))
    weights = tmp_path / "model.weights.h5"
    assert main(["checkpoint", "convert", str(directory), str(weights)]) == 0
    plain.set_weights([0 * w for w in plain.get_weights()])
    plain.load_weights(weights)
    assert all(map(np.array_equal, plain.get_weights(), model.get_weights()))
    assert main(["checkpoint", "convert", str(directory), str(tmp_path / "model.h5")]) == 2


def test_what_is_inside_is_shown_without_tensorflow(trained):
    directory, _ = trained
    code = "import sys; from tarantella_pp.cli.main import main\n"
    code += f"codes = [main(['checkpoint', what, {str(directory)!r}]) for what in "
    code += "('show', 'verify')]\nprint(codes, {'tensorflow', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    shown = done.stdout
    assert "[0, 0] set()" in shown, done.stderr
    for text in ("step-00000006", "rank-00000 ", "0, 1", "Trained: 2 epochs, 6 steps"):
        assert text in shown
    assert "Learning rate: 0.01" in shown


def test_everything_is_there_for_programs(trained, capsys):
    directory, _ = trained
    assert main(["checkpoint", "show", str(directory), "--tensors", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["step-00000006", "step-00000004"]
    assert told["step-00000006"]["tensors"]["model/0"]["shape"] == [3, 4]
    assert main(["checkpoint", "show", str(directory / "step-00000004"), "--tensors"]) == 0
    assert "model/0" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(directory / "none")]) == 2
    assert main(["checkpoint"]) == 2


def network():
    stack = [keras.Input((3,)), layers.Dense(4, "tanh"), layers.BatchNormalization()]
    return keras.Sequential([*stack, layers.Dense(3)])


def compiled(model=None):
    model = network() if model is None else model
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


def fit(model, *callbacks, **options):
    options = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    return model.fit(X.astype("float64"), Y, callbacks=callbacks, **options)


def distributed():
    keras.utils.set_random_seed(2)
    return compiled(tnt.PipelineModel(network, num_stages=2, num_micro_batches=1))


@pytest.fixture
def plain(float64):
    keras.utils.set_random_seed(1)
    model = compiled()
    fit(model)
    return model


def here(name):
    return f"{__file__}:{name}"


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_run_goes_on_from_a_file_of_plain_keras(plain, tmp_path, caplog, ending):
    file, run = str(tmp_path / f"model{ending}"), str(tmp_path / "run")
    plain.save(file) if ending == ".keras" else plain.save_weights(file)
    maker = [] if ending == ".keras" else ["--model", here("compiled")]
    assert main(["checkpoint", "convert", file, run, "--epoch", "2", *maker]) == 0
    assert main(["checkpoint", "verify", run]) == 0
    expected = fit(plain, initial_epoch=2, epochs=4)
    told = fit(distributed(), tnt.callbacks.Checkpoint(run), epochs=3)
    assert "begins anew" not in caplog.text
    more = fit(distributed(), tnt.callbacks.Checkpoint(run), epochs=4)
    assert told.epoch == [2]
    assert more.epoch == [2, 3]
    for name, values in expected.history.items():
        np.testing.assert_allclose(more.history[name], values, rtol=1e-10, atol=0)
    with pytest.raises(ConfigurationError, match=r"data\.batch_size: 4 in the checkpoint, 6 now"):
        fit(distributed(), tnt.callbacks.Checkpoint(run), batch_size=6, epochs=5)


def test_a_run_begins_with_weights_alone(plain, tmp_path, caplog):
    file, run, back = (str(tmp_path / name) for name in ("w.weights.h5", "run", "b.weights.h5"))
    plain.save_weights(file)
    convert = ["checkpoint", "convert", file, run]
    assert main(convert) == 2
    assert main([*convert, "--model", here("network")]) == 0
    expected = network()
    expected.load_weights(file)
    assert main(["checkpoint", "convert", run, back]) == 0
    again = network()
    again.load_weights(back)
    assert all(map(np.array_equal, again.get_weights(), plain.get_weights()))
    told = fit(distributed(), tnt.callbacks.Checkpoint(run))
    assert "it has no optimizer state, which begins anew" in caplog.text
    assert told.history["loss"] == pytest.approx(fit(compiled(expected)).history["loss"], rel=1e-10)
    assert main([*convert, "--model", here("network")]) == 2  # it has checkpoints now
    assert main(["checkpoint", "convert", file, str(tmp_path / "m.keras")]) == 2
    assert main(["checkpoint", "convert", run, back, "--epoch", "1"]) == 2
