"""`tnt.models`: what `keras.models` does, with models that are distributed from the start."""

import copy
import logging
import warnings
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tests.helpers import training
from tests.helpers.files import error_of, held_bytes
from tests.helpers.mpi import mpi_run
from tests.helpers.training import ROUNDING, compiled, distance, state_of, use_float64
from tests.zoo.models import FromArray, mlp, sequential

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]

IDS, X, Y = training.IDS[:16], training.X[:16], training.Y[:16]  # for batches of one size


@keras.saving.register_keras_serializable("tests")
class Blocks(layers.Layer):
    """Layers in lists, and in lists of those."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [layers.Dense(6, activation="tanh"), layers.Dense(6)]
        self.more = {"last": [layers.Dense(6)]}

    def build(self, shape):
        for layer in (*self.blocks, *self.more["last"]):
            layer.build(shape)

    def call(self, x):
        for layer in (*self.blocks, *self.more["last"]):
            x = layer(x)
        return x


@keras.saving.register_keras_serializable("tests")
class Centered(layers.Layer):
    """Makes something of its weights as soon as they are loaded."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), trainable=False)

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.sum = float(np.sum(self.center.numpy()))

    def call(self, x):
        return x - self.center


class Unregistered(layers.Layer):
    def build(self, shape):
        self.amount = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x + self.amount


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(4), layers.Dense(3)

    def call(self, x):
        return self.second(self.first(x))


def all_kinds():
    """Layers with weights, with statistics, with vocabularies; in lists, in models, twice."""
    ids, x = keras.Input((5,), dtype="int32"), keras.Input((6,))
    lookup, scale = layers.IntegerLookup(), layers.Normalization()
    lookup.adapt(IDS)
    scale.adapt(X)
    words = layers.Flatten()(layers.Embedding(3000, 5)(lookup(ids)))
    twice = layers.Dense(6, activation="tanh")
    values = Centered()(Blocks()(twice(twice(scale(x)))))
    inner = keras.Sequential([keras.Input((31,)), layers.Dense(9), layers.LayerNormalization()])
    both = inner(layers.Concatenate()([words, values]))
    return keras.Model([ids, x], layers.Dense(3)(layers.Dense(1200)(layers.Dropout(0.0)(both))))


def small(*more):
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), *more, layers.Dense(3)])


def saved(path, model, x=X, optimizer="adam"):
    """A file of a model that plain Keras has trained."""
    model.compile(optimizer, "mse", metrics=["mae"])
    gone_on(model, x)
    model.save(path)


def gone_on(model, x):
    """What a model tells when it is trained on."""
    if not isinstance(model, (tnt.PipelineModel, tnt.Model)):
        model.run_eagerly = True  # the same numbers, sooner
    return model.fit(x, Y, batch_size=8, shuffle=False, verbose=0).history


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    keras.utils.set_random_seed(1)
    path = tmp_path_factory.mktemp("models")
    averaging = keras.optimizers.AdamW(1e-2, use_ema=True, ema_momentum=0.5)
    scaled = keras.optimizers.LossScaleOptimizer(averaging, dynamic_growth_steps=2)
    saved(path / "all.keras", all_kinds(), [IDS, X], scaled)
    return path


def test_legacy_files(tmp_path):
    small().save(tmp_path / "model.h5")
    expected = keras.models.load_model(tmp_path / "model.h5").get_weights()
    model = tnt.models.load_model(str(tmp_path / "model.h5"), num_stages=2)
    assert distance([expected], [model.get_weights()]) == 0
    with pytest.raises(ConfigurationError, match="Expected the path of a file"):
        tnt.models.load_model(3)


def test_what_cannot_be_cut_is_data_parallel(tmp_path):
    plain = Subclassed()
    plain(X)
    saved(tmp_path / "model.keras", plain)
    expected = gone_on(keras.models.load_model(tmp_path / "model.keras"), X)
    inputs = keras.Input(X.shape[1:])
    model = tnt.models.load_model(tmp_path / "model.keras", inputs=inputs)
    assert isinstance(model, tnt.Model)
    assert distance(expected, gone_on(model, X)) < ROUNDING
    model.save(tmp_path / "on.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model inside has no optimizer of its own
        on = keras.models.load_model(tmp_path / "on.keras")
    assert distance(state_of(on), state_of(model)) == 0
    with pytest.raises(UnsupportedModelError, match=r"tnt\.Model"):
        tnt.models.load_model(tmp_path / "model.keras", num_stages=2)


def test_models_of_configurations_have_the_weights_of_keras():
    plain = compiled(sequential(), "adam", "mse")
    described = keras.saving.serialize_keras_object(plain)
    ways = {
        "config": (keras.Sequential.from_config, tnt.models.model_from_config, plain.get_config()),
        "object": (
            keras.saving.deserialize_keras_object, tnt.models.model_from_config, described
        ),
        "json": (keras.models.model_from_json, tnt.models.model_from_json, plain.to_json()),
        "clone": (keras.models.clone_model, tnt.models.clone_model, plain),
        "array": (
            keras.Sequential.from_config, tnt.models.model_from_config,
            small(FromArray()).get_config(),
        ),
    }  # fmt: skip
    for name, (usual, ours, given) in ways.items():
        keras.utils.set_random_seed(3)
        expected = usual(given)
        keras.utils.set_random_seed(3)
        model = ours(given, num_stages=2, num_micro_batches=1)
        assert type(model) is tnt.PipelineModel
        assert distance([expected.get_weights()], [model.get_weights()]) == 0, name
        assert model.compiled == expected.compiled == (name not in ("config", "array")), name
    with pytest.raises(ConfigurationError, match="no JSON"):
        tnt.models.model_from_json("model.json")


def test_clones_of_distributed_models():
    model = tnt.PipelineModel(mlp(), num_stages=3, num_micro_batches=2, schedule="gpipe")
    model.compile(keras.optimizers.SGD(0.5), "mse")
    twin = tnt.models.clone_model(model)
    assert twin.plan == model.plan
    assert twin.optimizer.get_config() == model.optimizer.get_config()
    assert twin.optimizer is not model.optimizer
    assert not {id(v) for v in twin.variables} & {id(v) for v in model.variables}
    assert type(tnt.models.clone_model(tnt.Model(mlp()))) is tnt.Model
    inputs = keras.Input((6,), name="other")
    wider = tnt.models.clone_model(
        model,
        input_tensors=inputs,
        clone_function=lambda layer: type(layer).from_config({**layer.get_config(), "name": None}),
        num_stages=2,
    )
    assert wider.plan.num_stages == 2
    assert [w.shape for w in wider.weights] == [w.shape for w in model.weights]


# On ranks


def load_everywhere(folder):
    """Loads, trains on and saves; how much a rank had of the whole."""
    use_float64()
    options = {"num_stages": 2, "num_micro_batches": 2, "balance": "memory"}
    model = tnt.models.load_model(f"{folder}/all.keras", **options)
    facts = {"held": held_bytes(model), "told": gone_on(model, [IDS, X])}
    tnt.models.save_model(model, f"{folder}/on.keras")
    facts["twin"] = held_bytes(tnt.models.clone_model(model))
    options = {"num_stages": 1, "num_micro_batches": 1, "shard_optimizer": True}
    shared = tnt.models.load_model(f"{folder}/on.keras", **options)
    facts |= {"replicas": shared.plan.num_replicas, "again": gone_on(shared, [IDS, X])}
    save_in_other_ways(Path(folder), model)
    facts["weights"] = weights_everywhere(Path(folder), model)
    facts["refused"] = refusals(Path(folder))
    return facts


def save_in_other_ways(folder, model):
    """From Keras' old format, and before there are slots; the rest is left to one process."""
    assert "in one process" in error_of(lambda: copy.deepcopy(model))
    new = compiled(tnt.PipelineModel(small(), num_stages=2, num_micro_batches=2), "adam", "mse")
    new.load_weights(folder / "legacy.h5")
    legacy = keras.models.load_model(folder / "legacy.h5", compile=False)
    assert distance(new.get_weights(), legacy.get_weights()) == 0
    new.save(folder / "new.keras")
    new.compile("adam", "mse")  # plain Keras keeps an optimizer without slots as it is, too
    with pytest.warns(UserWarning, match="keeps its state"):
        new.load_weights(folder / "small.weights.h5")


WEIGHT_FILES = "all.weights.h5", "all.weights.json", "all.keras"


def weights_everywhere(folder, model):
    """What each rank has of files of weights, and what it is told of those that do not fit."""
    found = {}
    for name in WEIGHT_FILES:
        model.set_weights([np.zeros(w.shape) for w in model.weights])
        model.load_weights(folder / name)
        found[name] = [w.tolist() for w in model.get_weights()]
    model.load_weights(folder / "all.weights.h5")
    found["loss"] = gone_on(model, [IDS, X])["loss"]
    other = tnt.PipelineModel(small(), num_stages=2, num_micro_batches=1)
    for name in ("all.weights.h5", "cut.weights.h5", "none.weights.h5"):
        found[f"no {name}"] = error_of(lambda name=name: other.load_weights(folder / name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_weights(folder / "all.weights.h5", skip_mismatch=True)
    assert np.isfinite(other.get_weights()[0]).all()
    return found


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_load_their_shares(folder):
    files(folder)
    run = mpi_run(2, load_everywhere, str(folder), timeout=240).check()
    plain = keras.models.load_model(folder / "all.keras")
    expected = [w.tolist() for w in plain.get_weights()]
    whole = sum(w.nbytes for w in plain.get_weights())
    told = gone_on(plain, [IDS, X])
    assert keras.models.load_model(folder / "new.keras").optimizer.built
    on = keras.models.load_model(folder / "on.keras")
    assert distance(state_of(on), state_of(plain)) < ROUNDING
    again = gone_on(on, [IDS, X])
    for rank, found in enumerate(run.results):
        assert distance(told, found["told"]) < ROUNDING
        assert distance(again, found["again"]) < ROUNDING
        assert found["held"] == found["twin"] < 0.8 * whole
        assert found["replicas"] == 2
        alone = found["weights"]
        assert distance(told["loss"], alone["loss"]) < ROUNDING
        for name in WEIGHT_FILES:
            assert alone[name] == expected, name
        for name in ("all", "cut", "none"):
            assert f"{name}.weights.h5" in alone[f"no {name}.weights.h5"]
        for name, (here, everywhere) in REFUSED.items():
            answer = found["refused"][name]
            assert (here if rank == 1 else everywhere) in answer, (name, rank, answer)
    keras.config.set_dtype_policy("mixed_float16")
    mixed = [keras.models.load_model(folder / f"mixed16{way}.keras") for way in ("", " on")]
    use_float64()
    assert isinstance(mixed[1].optimizer, keras.optimizers.LossScaleOptimizer)
    assert distance(*map(state_of, mixed)) == 0


# What the last rank is told, and the other one.
REFUSED = {
    "missing on one": ("No such file", "Rank 1 could not read"),
    "truncated": ("It is damaged", "It is damaged"),
    "other files": ("contents", "contents"),
    "no class": ("Unregistered", "Rank 1 could not build the model"),
    "no loss": ("own_loss", "own_loss"),
    "other weights": ("Dense 'wide' does not find", "Dense 'wide' does not find"),
    "subclassed": ("tnt.Model", "tnt.Model"),
    "other ways": ("must make the same calls", "must make the same calls"),
    "read-only": ("FileError", "could not save"),
}


@keras.saving.register_keras_serializable("tests")
def own_loss(y, p):
    return keras.ops.mean(keras.ops.square(y - p), axis=-1)


def files(folder):
    """What is read by `refusals`."""
    small(Unregistered()).save(folder / "unregistered.keras")
    plain = compiled(small(), "adam", own_loss)
    plain.save(folder / "loss.keras")
    plain.save(folder / "legacy.h5")
    gone_on(plain, X)
    plain.save_weights(folder / "small.weights.h5")
    plain = keras.models.load_model(folder / "all.keras")
    plain.save_weights(folder / "all.weights.h5")
    plain.save_weights(folder / "all.weights.json", max_shard_size=1)
    for name, end in (("all.weights.h5", "cut.weights.h5"), ("all.keras", "truncated.keras")):
        (folder / end).write_bytes((folder / name).read_bytes()[:9000])
    model = Subclassed()
    model(X)
    model.save(folder / "subclassed.keras")
    for rank, units in enumerate((7, 8)):
        stack = [keras.Input((6,)), layers.Dense(4), layers.Dense(units, name="wide")]
        keras.Sequential(stack).save(folder / f"rank{rank}.keras")
    # The description of one model with the weights of another.
    one, other = (zipfile.ZipFile(folder / f"rank{rank}.keras") for rank in range(2))
    with zipfile.ZipFile(folder / "mixed.keras", "w") as new:
        new.writestr("config.json", one.read("config.json"))
        new.writestr("model.weights.h5", other.read("model.weights.h5"))
    keras.config.set_dtype_policy("mixed_float16")
    saved(folder / "mixed16.keras", small(), X.astype("float32"))
    use_float64()


def refusals(folder):
    """What each wrong use is told on this rank; none of them hangs."""
    rank, messages = tnt.get_rank(), []

    class Kept(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    def load(name, **options):
        options = {"num_stages": 2, "num_micro_batches": 1, "balance": "memory", **options}
        return tnt.models.load_model(folder / f"{name}.keras", **options)

    logging.getLogger("tarantella_pp.models").addHandler(Kept())
    objects = {"Unregistered": Unregistered}
    found = {
        "missing on one": error_of(lambda: load("none" if rank else "rank0")),
        "truncated": error_of(lambda: load("truncated")),
        "other files": error_of(lambda: load(f"rank{rank}")),
        "no class": error_of(lambda: load("unregistered", custom_objects={} if rank else objects)),
        "other weights": error_of(lambda: load("mixed")),
        "subclassed": error_of(lambda: load("subclassed")),
        "other ways": error_of(lambda: load("rank0", balance=["memory", "time"][rank])),
    }
    assert error_of(lambda: load("unregistered", custom_objects=objects)) == ""
    keras.saving.get_custom_objects().pop("tests>own_loss")
    found["no loss"] = error_of(lambda: load("loss"))
    messages.clear()
    load("rank0", balance="time")
    tnt.models.load_model(folder / "legacy.h5", num_stages=2, compile=False)
    if rank:  # why each rank builds all of it
        assert "balance='time'" in messages[0]
        assert "files of this kind" in messages[1]
    keras.config.set_dtype_policy("mixed_float16")
    tnt.models.save_model(load("mixed16"), folder / "mixed16 on.keras")
    use_float64()
    plain = small()
    found["read-only"] = error_of(lambda: tnt.models.save_model(plain, folder / "no" / "a.keras"))
    tnt.models.save_model(plain, folder / "plain.keras")
    assert load("plain").count_params() == plain.count_params()
    return found
