"""The private parts of Keras that `internals` relies on, one by one.

When one of these fails after an upgrade of Keras, that file is the place to mend.
"""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.internals import functional

pytestmark = pytest.mark.keras

ADVICE = (
    f"Keras {keras.__version__} has changed a private part that "
    "tarantella_pp/internals/functional.py reads: "
)


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True)(inputs)
    x = layers.Dropout(0.5)(x)
    x = layers.LSTM(4)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def test_functional_keeps_its_calls_by_depth(model):
    by_depth = getattr(model, "_nodes_by_depth", None)
    assert isinstance(by_depth, dict), ADVICE + "Functional._nodes_by_depth"
    seen = set()
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            assert all(id(t) in seen for t in node.input_tensors), ADVICE + "order by depth"
            seen.update(id(t) for t in node.outputs)
    assert {id(t) for t in model.outputs} <= seen


def test_functional_keeps_its_structures(model):
    assert hasattr(model, "_inputs_struct"), ADVICE + "Functional._inputs_struct"
    assert hasattr(model, "_outputs_struct"), ADVICE + "Functional._outputs_struct"


def test_inputs_know_their_layer(model):
    layer = functional.input_layer_of(model.inputs[0])
    assert layer is model.layers[0], ADVICE + "KerasTensor._keras_history"


def test_layers_know_what_they_train_even_when_frozen():
    norm = layers.BatchNormalization()
    norm.build((None, 3))
    for norm.trainable in (True, False):
        trained = getattr(norm, "_trainable_variables", None)
        assert [v.name for v in trained or ()] == ["gamma", "beta"], (
            ADVICE + "Layer._trainable_variables"
        )


def test_sequential_holds_a_functional():
    built = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    from keras.src.models.functional import Functional

    assert isinstance(built._functional, Functional), ADVICE + "Sequential._functional"
    assert keras.Sequential([layers.Dense(2)])._functional is None, ADVICE + "unbuilt Sequential"


def test_nodes_fill_in_their_arguments(model):
    for node in [n for nodes in model._nodes_by_depth.values() for n in nodes if not n.is_input]:
        values = {id(t): i for i, t in enumerate(node.input_tensors)}
        args, kwargs = node.arguments.fill_in(values)
        found = [v for v in keras.tree.flatten((args, kwargs)) if type(v) is int]
        assert set(values.values()) <= set(found), ADVICE + "Node.arguments.fill_in"


def test_calls_bake_training_and_masks(model):
    by_kind = {
        type(n.operation).__name__: n for nodes in model._nodes_by_depth.values() for n in nodes
    }
    assert "NotEqual" in by_kind, ADVICE + "Embedding's mask is a call of its own"
    assert "mask" in by_kind["LSTM"].arguments.kwargs, ADVICE + "masks in Node.arguments"


def test_operation_fn_overrides_the_baked_training():
    from keras.src.models.functional import operation_fn

    dropout = layers.Dropout(0.5, seed=0)
    x = np.ones((4, 8), "float32")
    out = operation_fn(dropout, training=True)(x, training=False)
    assert not np.array_equal(np.array(out), x), ADVICE + "models.functional.operation_fn"


def test_layers_say_what_they_are(model):
    layer = layers.Dense(2)
    for name in ("_flatten_layers", "_call_context_args", "_remat_mode", "quantization_mode"):
        assert hasattr(layer, name), ADVICE + f"Layer.{name}"
    assert set(model._call_context_args) == {"training"}, ADVICE + "Layer._call_context_args"
    assert getattr(layer.compute_mask, "_is_default", False), ADVICE + "utils.default"
    assert not getattr(layers.Masking().compute_mask, "_is_default", False)
    assert not model.supports_masking, ADVICE + "Functional.supports_masking"
    assert layers.Dense.__module__.startswith("keras.src.layers."), ADVICE + "module names"


def test_models_know_metrics_that_are_attributes():
    model = keras.Sequential([layers.Dense(2)])
    model.compile(metrics=["mae"])
    assert functional.own_metrics(model) == [], ADVICE + "Layer._metrics"
    model.meter = keras.metrics.Mean(name="speed")
    assert functional.own_metrics(model) == [model.meter], ADVICE + "Layer._metrics"


def test_calls_of_models_are_those_of_their_class(model):
    from keras.src.models.functional import Functional

    assert type(model).call is Functional.call
    assert type(model).__call__ is layers.Layer.__call__, ADVICE + "Functional.__call__"
    assert "mask" in inspect.signature(Functional.call).parameters, ADVICE + "Functional.call"


def test_attention_deletes_the_masks_of_its_inputs_in_place():
    from keras.src import backend

    x = keras.ops.ones((2, 3, 4))
    backend.set_keras_mask(x, keras.ops.ones((2, 3), "bool"))
    layers.MultiHeadAttention(2, 2)(x, x)
    assert backend.get_keras_mask(x) is None, ADVICE + "MultiHeadAttention and masks"


def test_free_tensors_leave_no_trace(model):
    from keras.src import backend

    before = len(model.layers[0]._outbound_nodes)
    tensor = keras.KerasTensor((None, 5), "int32")
    mask = model.layers[1].compute_mask(tensor)
    spec = backend.compute_output_spec(model.layers[1], tensor)
    assert mask.shape == (None, 5)
    assert spec.shape == (None, 5, 4)
    assert len(model.layers[0]._outbound_nodes) == before, ADVICE + "symbolic calls"
