"""Each rank keeps the weights of its own stages, from the start or from the first step on."""

import random

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import StaleWeightError
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.files import error_of, held_bytes
from tests.helpers.mpi import mpi_run
from tests.helpers.training import BITS, IDS, X, Y, distance, from_logits, integers, use_float64
from tests.zoo.models import FromArray, dropout, tied_head

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]

QUIET = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
ROWS = 16  # samples for two batches of one size, for which stages are traced once


def all_kinds():
    """A model with initializers, states and seeds of many kinds."""
    ids = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 8, mask_zero=True)(ids)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LSTM(7, recurrent_initializer="orthogonal", return_sequences=True)(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dropout(0.3)(x)
    x = layers.Dense(6, kernel_initializer=keras.initializers.HeNormal(seed=3))(x)
    x = layers.Normalization(mean=0.5, variance=2.0)(x)
    return keras.Model(ids, layers.Dense(3, bias_initializer="ones")(layers.Flatten()(x)))


CASES = {
    "all kinds": (all_kinds, IDS, Y, lambda: "mse"),
    "tied": (tied_head, IDS, integers(6, 5, seed=8), from_logits),
}


def trained(name, wrap):
    """A model, its losses and its weights."""
    build, x, y, loss = CASES[name]
    keras.utils.set_random_seed(1)
    model = training.compiled(wrap(build), keras.optimizers.AdamW(1e-2, use_ema=True), loss())
    held = held_bytes(model)
    losses = model.fit(x[:ROWS], y[:ROWS], **QUIET).history["loss"]
    assert held_bytes(model) == held
    return model, [losses, [w.tolist() for w in model.get_weights()]]


def piped(model, **options):
    options = {"num_stages": 2, "num_micro_batches": 2, "balance": "memory", **options}
    return tnt.PipelineModel(model, **options)


def in_scope(build):
    with tnt.deferred_init():
        model = build()
    return piped(model)


def everything(folder):
    use_float64()
    random.seed(world().rank)  # ranks need not begin alike
    found = {"tied": trained("tied", in_scope)[1], "tuned": tuning(folder, piped)}
    model, found["all kinds"] = trained("all kinds", piped)
    shares = [held_bytes(model)]
    model.fit(IDS[:ROWS], Y[:ROWS], **QUIET)
    shares.append(held_bytes(model))
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    shares.append(held_bytes(model))
    expected = [w.tolist() for w in model.get_weights()]
    again = training.compiled(piped(all_kinds), "adam", "mse")
    again.load_weights(f"{folder}/model.weights.h5")
    shares.append(held_bytes(again))
    found["loaded"] = expected == [w.tolist() for w in again.get_weights()]
    found["shares"] = shares
    found["whole"] = all_kinds().count_params() * 8
    # A failure while others hand over values ends on all ranks, which can go on.
    found["failed"] = error_of(lambda: model.save(f"{folder}/none/model.keras"))
    found["after"] = model.fit(IDS[:ROWS], Y[:ROWS], **QUIET).history["loss"]
    return found


def tuned(path):
    """Builds a model that is loaded, compiled and tuned before it is wrapped."""

    def build():
        stack = [keras.Input((6,)), layers.Dense(40), FromArray(), layers.Dense(3)]
        model = keras.Sequential(stack)
        if path is not None:
            model.load_weights(path)
        model.layers[0].enable_lora(2)
        return training.compiled(model, keras.optimizers.Adam(0.01), "mse", metrics=["mae"])

    return build


def tuning(folder, wrap):
    """Losses and weights of such a model, and how much memory it has before."""
    use_float64()
    keras.utils.set_random_seed(2)
    model = wrap(tuned(f"{folder}/before.weights.{KINDS[world().size]}"))
    held = held_bytes(model)
    logs = model.fit(X[:ROWS], Y[:ROWS], **QUIET).history
    return held, [*logs.values(), *(weight.tolist() for weight in model.get_weights())]


KINDS = {1: "h5", 2: "json"}  # a file, or one in shards


@pytest.mark.mpi
@pytest.mark.slow
def test_no_rank_has_more_than_its_share(tmp_path):
    before = tuned(None)()
    before.layers[0].lora_kernel_b.assign(np.ones((2, 40)))
    before.save_weights(tmp_path / "before.weights.h5")
    before.save_weights(tmp_path / "before.weights.json", max_shard_size=3e-6)
    whole, tuned_there = tuning(tmp_path, lambda build: piped(build()))
    assert distance(tuning(tmp_path, piped)[1], tuned_there) < BITS
    run = mpi_run(2, everything, str(tmp_path), timeout=400, env={"TNT_TIMEOUT": "90"}).check()
    # Of weights that are there from the start, in one process
    usual = {name: trained(name, lambda build: piped(build()))[1] for name in CASES}
    for found in run.results:
        for name in CASES:
            assert distance(found[name], usual[name]) < BITS
        gathered, fitted, saved, loaded = found["shares"]
        assert gathered >= found["whole"]
        assert fitted == saved == loaded < 0.75 * found["whole"]
        assert found["loaded"]
        assert "FileError" in found["failed"] or "ConfigurationError" in found["failed"]
        assert np.isfinite(found["after"]).all()
        held, found_tuned = found["tuned"]
        assert distance(found_tuned, tuned_there) < BITS
        assert held < 0.9 * whole
    plain = keras.saving.load_model(tmp_path / "model.keras")
    other = all_kinds()
    other.load_weights(tmp_path / "model.weights.h5")
    assert distance([*map(np.asarray, plain.get_weights())], other.get_weights(), "weights") == 0.0
    assert plain.optimizer.iterations == 8


def test_what_cannot_be_deferred_is_refused():
    def own(shape, dtype=None):
        return np.zeros(shape)

    def with_values():
        model = dropout()
        model.set_weights([np.zeros(w.shape) for w in model.weights])
        return model

    def stack(initializer):
        dense = layers.Dense(2, kernel_initializer=initializer)
        return keras.Sequential([keras.Input((3,)), dense, layers.Dense(2)])

    seeds = keras.initializers.GlorotUniform(seed=keras.random.SeedGenerator(1))
    for name, build, options in (
        ("load", with_values, {}),
        ("own", lambda: stack(own), {}),
        ("seedgenerator", lambda: stack(seeds), {}),
        ("balance='time'", dropout, {"balance": "time"}),
    ):
        assert name in error_of(lambda: piped(build, **options)).lower()  # noqa: B023


def test_a_weight_without_a_value_is_not_read(tmp_path):
    with tnt.deferred_init():
        model = dropout()
    with pytest.raises(StaleWeightError, match="deferred_init"):
        model.get_weights()
    with pytest.raises(StaleWeightError, match="deferred_init"):
        model.save(tmp_path / "never.keras")
    assert model.count_params() == dropout().count_params()
    piped(model)
    assert len(model.get_weights()) == len(dropout().get_weights())

    def fails():
        dropout()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        piped(fails)
    assert dropout().get_weights()  # what is built afterwards has values
