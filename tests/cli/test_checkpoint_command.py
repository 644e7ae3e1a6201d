"""`tarantella checkpoint show | convert`, on checkpoints of a small model."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.cli.main import main

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

X, Y = np.random.default_rng(0).normal(size=(2, 12, 3)).astype("float32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, float64):
    directory = tmp_path_factory.mktemp("checkpoints")
    keras.utils.set_random_seed(1)
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    model = tnt.PipelineModel(plain, num_stages=2, num_micro_batches=1)
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    own = tnt.callbacks.Checkpoint(directory, every=2)
    both = {"callbacks": [own], "validation_data": (X[:4], 2 * Y[:4])}
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, **both)
    return directory, model


def test_a_file_of_plain_keras_goes_on_like_the_model(trained, tmp_path, capsys):
    directory, model = trained
    file = tmp_path / "model.keras"
    keras.config.set_floatx("float32")  # as a process has it that begins
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
    directory, model = trained
    code = "import sys; from tarantella_pp.cli.main import main\n"
    code += f"codes = [main(['checkpoint', what, {str(directory)!r}]) for what in "
    code += "('show', 'verify')]\nprint(codes, {'tensorflow', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    shown = done.stdout
    assert "[0, 0] set()" in shown, done.stderr
    for text in ("step-00000006", "rank-00000.safetensors ", "0, 1", "Trained: 2 epochs, 6 steps"):
        assert text in shown
    logs = ", ".join(f"{name} {values[-1]}" for name, values in model.history.history.items())
    assert f"Last epoch: {logs}." in shown
    assert "val_loss" in logs


def test_one_checkpoint_is_shown_alone(trained, capsys):
    directory, _ = trained
    assert main(["checkpoint", "show", str(directory / "step-00000004")]) == 0
    shown = capsys.readouterr().out
    assert "step-00000006" not in shown
    assert "Last step: loss " in shown
    assert main(["checkpoint", "show", str(directory / "none")]) == 2
    with pytest.raises(SystemExit):
        main(["checkpoint"])
