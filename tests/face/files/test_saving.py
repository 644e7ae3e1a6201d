"""Weights and files: those of plain Keras, which loads them and trains on identically."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tarantella_pp.models.pipeline_model import PipelineModel
from tests.helpers.training import CASES, X, adamw, decaying, distance, make
from tests.zoo.models import (
    mlp,
    nested,
    recurrent,
    regularized,
    residual_cnn,
    sequential,
    two_in_two_out,
)

pytestmark = pytest.mark.keras

BITS = 1e-13
QUIET = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}


def trained(name, optimizer, **options):
    case = CASES[name]
    model = make(case, **{"num_stages": 2, "num_micro_batches": 1, **options})
    compiled = case.compiled()
    model.compile(**{**compiled, "optimizer": optimizer()})
    model.fit(case.x, case.y, **QUIET)
    return model, case


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sequential", adamw),
        pytest.param("nested", decaying, marks=pytest.mark.slow),
        pytest.param("two_in_two_out", adamw, marks=pytest.mark.slow),
        pytest.param("frozen", adamw, marks=pytest.mark.slow),
    ],
)
def test_stock_keras_trains_on_identically(tmp_path, name, optimizer):
    model, case = trained(name, optimizer)
    model.save(tmp_path / "model.keras")
    stock = keras.saving.load_model(tmp_path / "model.keras")
    assert type(stock) is type(case.build())
    assert type(stock).__module__.startswith("keras.")
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]
    for _ in range(2):
        results = [
            (m.evaluate(case.x, case.y, verbose=0), m.predict(case.x, verbose=0), m.get_weights())
            for m in (model, stock)
        ]
        for first, second in zip(*results, strict=True):
            assert distance(first, second) < BITS
        told = [m.fit(case.x, case.y, **QUIET).history for m in (model, stock)]
        assert distance(*told) < BITS
    assert int(stock.optimizer.iterations) == int(model.optimizer.iterations) == 9


@pytest.mark.slow
def test_files_without_optimizer(tmp_path):
    model, case = trained("sequential", adamw)
    model.save(tmp_path / "model.keras", include_optimizer=False)
    stock = keras.saving.load_model(tmp_path / "model.keras")
    assert not stock.compiled
    assert distance(model.predict(case.x, verbose=0), stock.predict(case.x, verbose=0)) < BITS
    bare = PipelineModel(mlp(), num_stages=2)
    bare.save(tmp_path / "bare.keras")
    assert not keras.saving.load_model(tmp_path / "bare.keras").compiled


BUILDS = [mlp, sequential, residual_cnn, nested, recurrent, regularized, two_in_two_out]


@pytest.mark.parametrize("build", BUILDS)
def test_weights_are_in_the_order_of_keras(tmp_path, build):
    plain, other = build(), build()
    model = PipelineModel(other, num_stages=2)
    values = [np.random.default_rng(i).normal(size=w.shape) for i, w in enumerate(plain.weights)]
    plain.set_weights(values)
    model.set_weights(values)
    assert distance(model.get_weights(), values) == 0
    assert distance(other.get_weights(), values) == 0
    assert model.count_params() == plain.count_params()
    model.save_weights(tmp_path / "a.weights.h5")
    plain.save_weights(tmp_path / "b.weights.h5")
    fresh = build()
    fresh.load_weights(tmp_path / "a.weights.h5")
    assert distance(fresh.get_weights(), values) == 0
    model.set_weights([np.zeros_like(v) for v in values])
    model.load_weights(tmp_path / "b.weights.h5")
    assert distance(model.get_weights(), values) == 0


@pytest.mark.slow
def test_weights_with_optimizer(tmp_path):
    model, case = trained("mlp", adamw)
    model.save_weights(tmp_path / "a.weights.h5")
    stock = case.build()
    stock.compile(adamw(), "mse")
    stock.optimizer.build(stock.trainable_variables)
    stock.load_weights(tmp_path / "a.weights.h5")
    told = [m.fit(case.x, case.y, **QUIET).history["loss"] for m in (model, stock)]
    assert distance(*told) < BITS


def test_architecture_and_layers_are_those_of_the_model():
    plain = nested()
    model = PipelineModel(plain, num_stages=2)
    assert model.get_config() == plain.get_config()
    assert [layer.name for layer in model.layers] == [layer.name for layer in plain.layers]
    assert model.name == plain.name
    assert distance(np.asarray(model(X)), np.asarray(plain(X))) == 0
