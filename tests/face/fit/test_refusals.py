"""What cannot work is refused before any training, with the option, its value and what to do."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError, ScheduleError, UnsupportedModelError
from tests.helpers.training import compiled, squared_of_largest
from tests.zoo.models import mlp, residual_cnn, two_in_two_out, unreached

pytestmark = pytest.mark.keras


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_stages": True}, "num_stages=True"),
        ({"num_stages": 2.0}, "num_stages=2.0"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"schedule": "1b1f"}, "schedule='1b1f'"),
        ({"schedule": 3}, "schedule=3"),
        ({"schedule": "zb-v", "num_stages": 3}, "num_stages=3"),
        ({"wire_dtype": "float16"}, "wire_dtype='float16'"),
        ({"gradient_dtype": "float16"}, "gradient_dtype='float16'"),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"plan": 3}, "plan=3"),
    ],
)
def test_options(options, message):
    with pytest.raises((ConfigurationError, PlanError, ScheduleError)) as caught:
        tnt.PipelineModel(mlp(), **options)
    assert message in str(caught.value)


def test_what_is_a_pipeline_already_or_no_model():
    with pytest.raises(UnsupportedModelError, match="pipeline already"):
        tnt.PipelineModel(tnt.PipelineModel(mlp(), 2), num_stages=1)
    with pytest.raises(UnsupportedModelError, match=r"Received: model='mlp\.keras'"):
        tnt.PipelineModel("mlp.keras", num_stages=1)


STEPS = "train_step test_step predict_step compute_loss compute_metrics metrics call"


@pytest.mark.parametrize("name", STEPS.split())
def test_subclasses_with_steps_of_their_own(name):
    kind = type("Own", (tnt.PipelineModel,), {name: lambda self, *args, **kwargs: {"loss": 0.0}})
    with pytest.raises(UnsupportedModelError, match=f"Class Own overrides {name}"):
        kind(mlp(), num_stages=1)


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match="KERAS_BACKEND='jax'"):
        tnt.PipelineModel(mlp(), num_stages=1)


@pytest.fixture(scope="module")
def model():
    return tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2)


def test_a_compilation_that_is_refused_changes_nothing():
    model = tnt.PipelineModel(mlp(), num_stages=2, num_micro_batches=2, schedule="1f1b")
    model.compile("sgd", "mse")
    before = model.optimizer
    for given, named in (((squared_of_largest,), {}), ((), {"loss": squared_of_largest})):
        with pytest.raises(ConfigurationError, match=r"schedule='1f1b'.*loss 'squared_of"):
            model.compile("adam", *given, **named)
    assert model.optimizer is before
    assert model.loss == "mse"
    plain = compiled(mlp(), "sgd", squared_of_largest)
    with pytest.raises(ConfigurationError, match="squared_of_largest"):
        tnt.PipelineModel(plain, num_stages=2, num_micro_batches=2, schedule="1f1b")


def test_training_before_compile_or_without_a_loss_and_arguments_that_keras_does_not_have():
    model = tnt.PipelineModel(mlp(), num_stages=2)
    with pytest.raises(ValueError, match="compile"):
        model.fit(np.ones((4, 6)), np.ones((4, 3)), verbose=0)
    model.compile("sgd")
    for call in (model.fit, model.evaluate, model.train_on_batch):
        with pytest.raises(ValueError, match="No loss to compute"):
            call(np.ones((4, 6)), np.ones((4, 3)))
    with pytest.raises(TypeError, match="optimiser"):
        model.compile(optimiser="sgd")
    with pytest.raises(TypeError, match="'num_stage'"):
        tnt.PipelineModel(mlp(), num_stage=2)


def test_plans_of_other_models(tmp_path):
    plan = tnt.make_plan(two_in_two_out(), 2)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="another model"):
        tnt.PipelineModel(mlp(), plan=tmp_path / "plan.json")
    with pytest.raises((PlanError, FileNotFoundError)):
        tnt.PipelineModel(mlp(), plan=tmp_path / "none.json")


def test_a_plan_decides_alone():
    plan = tnt.make_plan(mlp(), 2, num_micro_batches=3, schedule="gpipe")
    options = {"num_stages": 2, "num_micro_batches": 4, "schedule": "1f1b"}
    for name, value in {**options, "wire_dtype": "bfloat16"}.items():
        with pytest.raises(ConfigurationError, match=f"plan together with {name}"):
            tnt.PipelineModel(mlp(), plan=plan, **{name: value})
    model = tnt.PipelineModel(mlp(), plan=plan)
    assert model.plan.schedule == "gpipe"
    assert model.plan.num_micro_batches == 3


def test_batch_statistics_are_warned_of():
    def cnn():
        return residual_cnn(layers.BatchNormalization)

    with pytest.warns(
        UserWarning, match=r"batch_normalization\w*, batch_normalization.*micro"
    ) as w:
        tnt.PipelineModel(cnn(), num_stages=2, num_micro_batches=2).compile("sgd", "mse")
    assert len(w) == 1
    assert w[0].filename == __file__
    many = keras.Sequential([keras.Input((4,)), *(layers.BatchNormalization() for _ in range(9))])
    with pytest.warns(UserWarning, match=r"layers (\w+, ){3}and 6 more take"):
        tnt.PipelineModel(many, num_stages=2, num_micro_batches=2).compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tnt.PipelineModel(cnn(), num_stages=2, num_micro_batches=1).compile("sgd", "mse")
        tnt.PipelineModel(residual_cnn(), num_stages=2, num_micro_batches=2).compile("sgd", "mse")
        model = cnn()
        for layer in model.layers:
            layer.trainable = not isinstance(layer, layers.BatchNormalization)
        tnt.PipelineModel(model, num_stages=2, num_micro_batches=2).compile("sgd", "mse")
    thawed = cnn()
    thawed.trainable = False
    model = compiled(tnt.PipelineModel(thawed, num_stages=2, num_micro_batches=2), "sgd", "mse")
    model.trainable = True
    with pytest.warns(UserWarning, match="take their statistics of each"):
        model.compile("sgd", "mse")


def test_export_and_formats(model, tmp_path):
    with pytest.raises(ConfigurationError, match="save"):
        model.export(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"model\.tf"):
        model.save(tmp_path / "model.tf")


def test_outputs_without_a_loss_models_without_gradients_and_data_without_targets(model):
    unused = compiled(tnt.PipelineModel(unreached(), num_stages=2), "sgd", {"nothing": "mse"})
    with pytest.raises(ValueError, match="nothing"):
        unused.fit(np.ones((4, 6)), {"used": np.ones((4, 3))}, verbose=0)
    rounds = tnt.PipelineModel(keras.Sequential([mlp(), layers.Lambda(keras.ops.round)]), 2)
    rounds.compile("sgd", "mse")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="No gradients provided for any variable"):
            rounds.fit(np.ones((4, 6)), np.ones((4, 3)), verbose=0)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="cardinality"):
        model.fit(np.ones((4, 6)), np.ones((3, 3)), verbose=0)
