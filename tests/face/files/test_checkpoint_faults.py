"""Whatever happens while a checkpoint is written, or to it later, none that is wrong is loaded."""

import os
import shutil
from types import SimpleNamespace

import keras
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.callbacks import checkpoint_folder
from tarantella_pp.callbacks.checkpoint_folder import checksum_of
from tarantella_pp.callbacks.checkpoint_reader import refuse_others
from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError, FileError, FormatError
from tarantella_pp.launch import guard
from tests.face.files.test_checkpoints import At, joined
from tests.helpers.files import contents, full_disk
from tests.helpers.training import compiled, compiled_once, floats

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]

X, Y = floats(6, seed=1), floats(3, seed=2)


@compiled_once
def model(units=8, activation="tanh", rate=0.1, loss="mse", frozen=False):
    keras.utils.set_random_seed(1)
    stack = [keras.Input((6,)), layers.Dense(units, activation), layers.Dense(3)]
    plain = keras.Sequential(stack)
    plain.layers[0].trainable = not frozen
    wrapped = tnt.PipelineModel(plain, num_stages=1, num_micro_batches=1)
    return compiled(wrapped, keras.optimizers.Adam(rate), loss)


def fit(directory, given=None, epochs=3, x=X, **options):
    """Losses of each epoch, three steps each, with a checkpoint after each step."""
    own = tnt.callbacks.Checkpoint(directory, every=1, keep=options.pop("keep", 3))
    options = {"batch_size": 8, "verbose": 0, **options}
    callbacks = [*options.pop("callbacks", ()), own]
    told = (given or model()).fit(x, Y, epochs=epochs, callbacks=callbacks, **options)
    return told.history["loss"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 4, 5 and 6 of 9, and all losses there would be."""
    directory = tmp_path_factory.mktemp("written") / "run"
    losses = fit(directory, epochs=2)
    assert sorted(os.listdir(directory)) == ["step-00000004", "step-00000005", "step-00000006"]
    whole = directory.parent / "whole"
    shutil.copytree(directory, whole)
    expected = fit(whole)
    assert expected[:2] == losses
    assert fit(directory.parent / "at once") == expected
    return directory, expected


@pytest.fixture
def run(written, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(written[0], directory)
    return directory, written[1]


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-1])


def replaced(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def signed(path, text):
    path.write_bytes(text)
    path.with_suffix(".json.sha256").write_bytes(checksum_of(text))


DAMAGE = {
    "flipped": ("rank-00000.safetensors", flipped),
    "shortened": ("rank-00000.safetensors", shortened),
    "missing": ("rank-00000.safetensors", lambda path: path.unlink()),
    "manifest": ("manifest.json", shortened),
    "another epoch": ("manifest.json", lambda path: replaced(path, b'"epoch": 2', b'"epoch": 1')),
    "no manifest": ("manifest.json", lambda path: path.unlink()),
    "no JSON": ("manifest.json", lambda path: signed(path, b"{")),
    "not ours": ("manifest.json", lambda path: signed(path, b'{"format": 2}')),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named(run, capsys, kind):
    directory, _ = run
    name, harm = DAMAGE[kind]
    assert main(["checkpoint", "verify", str(directory)]) == 0
    harm(directory / "step-00000006" / name)
    assert main(["checkpoint", "verify", str(directory)]) == 1
    assert f"step-00000006/{name}'" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["flipped", "not ours"])
def test_of_damaged_checkpoints_the_one_before_is_taken(run, caplog, kind):
    directory, expected = run
    DAMAGE[kind][1](directory / "step-00000006" / DAMAGE[kind][0])
    (directory / "step-00000005").rename(directory / ".replaced-step-00000005")  # by a kill
    assert fit(directory) == expected
    assert "step-00000006" in caplog.messages[0]
    assert "step-00000005', which has trained 1 epoch, step 2 of the next" in caplog.text
    assert main(["checkpoint", "verify", str(directory)]) == 0  # written anew


def test_the_launcher_hears_where_a_run_goes_on(run, monkeypatch):
    noted = []
    monkeypatch.setattr(guard, "note", lambda **fields: noted.append(fields["step"]))
    fit(run[0])
    assert noted == [6, 7, 8, 9]


def test_nothing_begins_anew_where_all_checkpoints_are_damaged(run):
    directory, _ = run
    for path in directory.iterdir():
        flipped(path / "rank-00000.safetensors")
    before = contents(directory)
    with pytest.raises(FileError, match=r"All checkpoints in .* are damaged: step-00000006"):
        fit(directory)
    assert contents(directory) == before


def test_another_format_is_not_taken_for_damage(run, capsys):
    directory, _ = run
    for path in directory.iterdir():
        path /= "manifest.json"
        signed(path, path.read_bytes().replace(b'"format": 2', b'"format": 1'))
    before = contents(directory)
    with pytest.raises(FormatError, match=r"has format 1, .* use the version .* end that") as told:
        fit(directory)
    assert "damaged" not in str(told.value)
    assert "Remove" not in str(told.value)
    assert contents(directory) == before
    assert main(["checkpoint", "verify", str(directory)]) == 1
    output = "".join(capsys.readouterr())
    assert "has format 1" in output
    assert "damaged" not in output


def test_a_full_disk_leaves_the_old_checkpoints(run):
    directory, expected = run
    before = contents(directory)
    for size in (100, 3000):  # for the tensors, or for the manifest
        with full_disk(size), pytest.raises(FileError, match=r"Rank 0 could .*00000007.*arge"):
            fit(directory)
        assert contents(directory) == before
    assert fit(directory) == expected


def test_a_folder_that_is_none_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    trained = model()
    with pytest.raises(FileError, match=r"Rank 0 could not write a checkpoint, .*file/run"):
        fit(tmp_path / "file" / "run", trained)
    assert int(trained.optimizer.iterations) == 0


def test_another_job_in_the_directory_is_noticed(run):
    directory, expected = run
    for name in (f"{checkpoint_folder.DRAFT}step-00000008.0000", "step-00000009"):
        other = directory / name
        with pytest.raises(FileError, match=rf"00000008'.* another job writes .* it has '{name}'"):
            fit(directory, callbacks=[At(8, lambda _, other=other: other.mkdir())])
        assert other.is_dir()  # for that job has done nothing wrong
        shutil.rmtree(directory / "step-00000007")
    other.rmdir()
    assert fit(directory) == expected
    assert sorted(os.listdir(directory)) == ["step-00000007", "step-00000008", "step-00000009"]


@pytest.mark.slow
def test_damaged_checkpoints_are_not_kept_in_place_of_good_ones(run):
    directory, expected = run
    for step in (5, 6):
        flipped(directory / f"step-{step:08d}" / "rank-00000.safetensors")
    left = []

    def look(callback):
        joined()
        left.extend(os.listdir(directory))

    assert fit(directory, keep=1, callbacks=[At(6, look)]) == expected
    assert left == ["step-00000005"]


OTHERS = {
    "layers.config.layers.*units: 8 in the checkpoint, 9 now": lambda: {"given": model(9)},
    "activation: 'tanh' in the checkpoint, 'relu'": lambda: {"given": model(activation="relu")},
    "compiled.optimizer.learning_rate: 0.1.* in the checkpoint, 0.2": lambda: {
        "given": model(rate=0.2)
    },
    "compiled.loss: 'mse' in the checkpoint, 'mae' now": lambda: {"given": model(loss="mae")},
    r"variables\[0\]\[3\]: True in the checkpoint, False now": lambda: {
        "given": model(frozen=True)
    },
    "data.contents: 'arrays float64 .22, 6.*data.batch_size: 8 in the checkpoint, 4 now": lambda: {
        "x": X + 1, "batch_size": 4,
    },
    "data.shuffle: True in the checkpoint": lambda: {"shuffle": False},
    "has trained 2 epochs. Received: initial_epoch=3": lambda: {"initial_epoch": 3, "epochs": 4},
}  # fmt: skip


def test_another_run_is_refused_by_what_differs(run):
    directory, expected = run
    before = contents(directory)
    for message, options in OTHERS.items():
        with pytest.raises(ConfigurationError, match=message):
            fit(directory, **options())
    assert contents(directory) == before
    assert fit(directory) == expected


@pytest.mark.slow
def test_another_option_of_the_loss_is_another_loss(tmp_path):
    huber = keras.losses.Huber  # whose configuration has no delta
    fit(tmp_path, model(loss=huber(delta=0.3)), epochs=1)
    for other in (huber(), huber(delta=0.3, reduction="sum")):
        with pytest.raises(ConfigurationError, match=r"compiled.loss: .*delta': 0.3"):
            fit(tmp_path, model(loss=other))
    fit(tmp_path, model(loss=huber(delta=0.3)))


def test_a_run_that_could_not_be_started_again_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setenv("TNT_RESTARTS", "1")
    trained = model()
    with pytest.raises(
        ConfigurationError, match=r"--restarts` and no Checkpoint .* leave --res"
    ) as told:
        trained.fit(X, Y, verbose=0)
    assert told.value.is_final
    assert int(trained.optimizer.iterations) == 0
    fit(tmp_path, trained, epochs=1)


def test_what_cannot_work_is_refused(tmp_path):
    make = tnt.callbacks.Checkpoint
    for options in ({"every": 0}, {"every": "step"}, {"keep": 0}, {"directory": 3}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
            make(**{"directory": tmp_path, **options})
    both = [make(tmp_path / "a"), make(tmp_path / "b")]
    with pytest.raises(ConfigurationError, match="from one directory"):
        model().fit(X, Y, callbacks=both, verbose=0)
    plain = compiled(keras.Sequential([keras.Input((6,)), layers.Dense(3)]), "sgd", "mse")
    with pytest.raises(ConfigurationError, match="Wrap it"):
        plain.fit(X, Y, callbacks=[make(tmp_path / "a")], verbose=0)
    assert not list(tmp_path.iterdir())


def test_what_training_builds_is_no_sign_of_another_run():
    """A model with steps of its own is built by its first batch."""
    facts = {"compiled": {}}
    unbuilt, built = (
        {"class_name": "GAN", "build_config": shape} for shape in (None, {"input_shape": [None, 6]})
    )
    saved = SimpleNamespace(facts=facts, config=unbuilt, learning_rate=None)
    refuse_others(saved, {"floatx": "float32", **facts}, built, None, "here")  # of an older one
    with pytest.raises(ConfigurationError, match="class_name: 'GAN' in the checkpoint, 'VAE' now"):
        refuse_others(saved, facts, {**built, "class_name": "VAE"}, None, "here")
