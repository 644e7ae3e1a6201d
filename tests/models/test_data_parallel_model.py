"""`Model` and `Sequential`: pipelines of one stage, with the face of a Keras model."""

from __future__ import annotations

import keras
import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.data_parallel_model import Model, Sequential
from tarantella_pp.models.make_plan import make_plan
from tests.helpers.models import mlp
from tests.helpers.training import CASES, distance, finish, serial

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]


def trained(wrap):
    keras.utils.set_random_seed(1)
    case = CASES["mlp"]
    model = wrap(case.build())
    model.compile(**case.compiled())
    return model, finish(model, case)


@pytest.mark.parametrize("wrap", [Model, Sequential])
def test_one_process_trains_as_plain_keras(wrap):
    model, outcome = trained(wrap)
    assert model.plan.num_stages == 1
    assert distance(serial("mlp"), outcome) < 1e-13


def test_layers_make_a_model():
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)]
    model = Sequential(layers, name="stack", num_micro_batches=2)
    assert model.name == "stack"
    assert model.output_shape == (None, 2)
    assert model.plan.num_micro_batches == 2
    assert type(Sequential.from_config(model.get_config())) is keras.Sequential


def test_a_plan_of_several_stages_is_refused():
    assert Model(mlp(), plan=make_plan(mlp(), 1)).plan.num_stages == 1
    with pytest.raises(ConfigurationError, match="a plan of 2 stages"):
        Model(mlp(), plan=make_plan(mlp(), 2))
