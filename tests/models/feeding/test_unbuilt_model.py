"""Models whose shapes come with the data: planned then, on all ranks, and trained as in Keras."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, TarantellaError
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, distance, use_float64

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]


class Named(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(Y.shape[1])

    def call(self, inputs):
        return self.last(self.first(inputs["a"]) * inputs["b"])


def stack():
    keras.utils.set_random_seed(5)
    return keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(Y.shape[1])])


def batches():
    for i in range(0, 12, 4):
        yield {"a": X[i : i + 4], "b": X[i : i + 4, :1]}, Y[i : i + 4]


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]


def numbers(model, x, *y, **options):
    model.compile("adam", "mse")
    found = model.fit(x, *y, verbose=0, shuffle=False, **options).history
    return [found, [w.tolist() for w in model.get_weights()]]


def trained(wrap_stack, wrap_model, here=True):
    """What each kind of data gives a model that is not built."""
    given = (X, Y) if here else (None,)
    parts = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    return [
        numbers(wrap_stack(stack()), *given, batch_size=8, epochs=2),
        numbers(wrap_stack(stack()), parts),
        numbers(wrap_stack(stack()), Pieces(workers=1)),
        numbers(wrap_model(Named()), batches()),
    ]


def train():
    use_float64()
    ranks = tnt.get_size()
    found = trained(lambda m: tnt.PipelineModel(m, ranks), tnt.Model, tnt.get_rank() == 0)
    model = tnt.Model(stack())
    try:
        model.fit("no data" if tnt.get_rank() == 0 else None)
    except Exception as error:
        found.append(type(error).__name__)
    return json.loads(json.dumps(found))


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_agree_on_the_plan_of_the_first_data():
    first, second = mpi_run(2, train, timeout=200).check().results
    assert first[:-1] == second[:-1]
    assert second[-1] == "ConfigurationError"
    assert distance(trained(lambda m: m, lambda m: m), first[:-1]) < 1e-10


def test_nothing_is_known_before_and_all_of_it_afterwards():
    model = tnt.Sequential([layers.Dense(3)])
    model.compile("adam", "mse")
    assert model.compiled
    assert isinstance(model, tnt.Sequential)
    for read in (lambda: model.plan, lambda: model.save("m.keras"), model.get_weights):
        with pytest.raises(ConfigurationError, match=r"not known yet.*build\(input_shape\)"):
            read()
    optimizer = model.optimizer
    model.build((None, 4))
    assert model.plan.num_stages == 1
    assert model.optimizer is optimizer
    assert model.output_shape == (None, 3)
    assert type(model) is tnt.Sequential


def test_a_model_that_cannot_be_built_goes_on_waiting():
    model = tnt.Model(Named())
    with pytest.raises(TarantellaError, match="cannot be called with"):
        model.build((None, 4))
    model.build({"a": (None, 4), "b": (None, 1)})
    assert np.shape(model.predict({"a": X[:2, :4], "b": X[:2, :1]}, verbose=0)) == (2, Y.shape[1])


def test_subclassed_models_are_not_cut():
    with pytest.raises(TarantellaError, match=r"subclassed model .* tnt\.Model"):
        tnt.PipelineModel(Named(), num_stages=2)
