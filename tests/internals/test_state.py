"""The private parts of Keras that saving, slots and remote weights rely on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tarantella_pp.errors import StaleWeightError, UnsupportedModelError
from tarantella_pp.internals import state
from tarantella_pp.internals.optimizers import count_step, parts_of
from tarantella_pp.runtime.weights.remote_variables import StepCounter, is_stale, make_remote

pytestmark = pytest.mark.keras


@pytest.fixture
def weights():
    layer = layers.Dense(3)
    layer.build((None, 4))
    return layer.trainable_variables


def test_an_optimizer_for_a_part_is_as_if_it_had_been_built_for_it(weights):
    """Options, steps and what `compile` does not know of stay; slots go."""
    state.name_by_path(weights[0], "elsewhere/kernel")
    assert weights[0].path == "elsewhere/kernel", "Variable._path"
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(weights)
    optimizer.iterations.assign(7)
    optimizer.variables[5].assign([1, 2, 3])  # the velocity of the bias
    places = state.divide(optimizer, weights, weights[1:])
    assert [place.positions for place in places] == [[], [], [0], [0], [1], [1]]
    assert [tuple(v.shape) for v in optimizer.variables] == [(), (), (3,), (3,)]
    assert optimizer.variables[3].numpy().tolist() == [1, 2, 3]
    # TensorFlow keeps 36 KB for each name that a variable has had, for ever.
    assert {v.value.name for v in optimizer.variables[2:]} == {f"{optimizer.name}/slot:0"}
    assert int(optimizer.iterations) == 7
    assert not optimizer._use_weight_decay(weights[1])
    optimizer.apply([np.ones(3, "float32")], weights[1:])
    state.rebuild(optimizer, [])
    assert not optimizer.built
    assert len(optimizer.variables) == 2
    optimizer.inside = keras.optimizers.SGD()
    for outer in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        with pytest.raises(UnsupportedModelError, match="AdamW keeps another one, 'inside'"):
            state.divide(outer, weights, weights[1:])
    del optimizer.inside
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer, {}))
    state.divide(several, weights, weights[1:])
    assert parts_of(several)[1:] == [optimizer], "_inner_optimizers, _optimizer_map"


def test_a_step_that_updates_nothing_is_one_for_what_all_weights_share(weights):
    """What is saved of it may come from a rank that no gradient reaches."""
    counted, applied = keras.optimizers.Nadam(), keras.optimizers.Nadam()
    for optimizer in (counted, applied):
        optimizer.build(weights)
    for _ in range(3):
        tf.function(lambda: count_step(counted), autograph=False)()
        applied.apply([np.ones((4, 3), "float32"), np.ones(3, "float32")], weights)
    assert int(counted.iterations) == int(applied.iterations) == 3
    assert float(counted._u_product) == pytest.approx(float(applied._u_product), rel=1e-6)
    assert float(counted._u_product) < 1


def test_what_is_refused_leaves_an_optimizer_as_it_was(weights, monkeypatch):
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)
    optimizer.variables[2].assign(np.ones((4, 3)))

    def fail(*_):
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(state, "stand_in", lambda weight: weight)
        patch.setattr(state, "Place", fail)
        with pytest.raises(ValueError, match="no"):
            state.divide(optimizer, weights, weights[:1])
    assert len(optimizer.variables) == 6
    assert optimizer.variables[2].numpy().sum() == 12


def test_models_remember_how_they_were_compiled():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    given = state.compiled_with(model)
    assert given["optimizer"] is model.optimizer, "Model._compile_config"
    names = set(inspect.signature(keras.Model.compile).parameters)
    assert set(given) <= names
    assert given["metrics"] == ["mae"]


def test_a_remote_variable_is_read_only_while_it_is_true():
    layer = layers.Dense(3)
    layer.build((None, 2))
    clocks = [StepCounter(), StepCounter()]
    for clock in clocks:
        make_remote(layer.kernel, clock)
    assert isinstance(layer.kernel, keras.Variable)
    layer(np.ones((1, 2)))
    for clock in clocks:
        clock.advance()
        for read in (layer.get_weights, layer.kernel.numpy, lambda: layer(np.ones((1, 2)))):
            with pytest.raises(StaleWeightError, match="get_weights"):
                read()
        assert is_stale(layer.kernel)
        assert layer.kernel.shape == (2, 3)
        # Keras runs layers to learn shapes, in a scope that tells.
        assert layer(keras.Input((2,))).shape == (None, 3), "in_symbolic_scope"
        layer.kernel.assign(np.ones((2, 3)))
        assert layer.get_weights()[0].sum() == 6


def test_a_variable_gives_its_memory_back_and_stays_the_same(weights):
    kernel = weights[0]
    traced = tf.function(lambda: tf.reduce_sum(kernel.value))
    handle, total = kernel._value.handle, float(traced())
    value = kernel.numpy()
    state.drop_value(kernel)
    assert tf.size(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)) == 0
    assert kernel.shape == value.shape, "Variable._value"
    state.give_value(kernel, 2 * value)
    assert kernel._value.handle is handle
    assert float(traced()) == pytest.approx(2 * total)
    kernel.assign(value)  # as ever
    np.testing.assert_array_equal(kernel.numpy(), value)


def test_values_that_variables_are_given_are_kept_in_stateless_scopes():
    with state.given_values_kept(), keras.StatelessScope(initialize_variables=False):
        rate = keras.Variable(0.5, name="rate")
        kernel = keras.Variable("ones", shape=(2,))
        with state.outside_stateless_scopes():
            ready = keras.Variable("ones", shape=(2,))
    assert float(rate) == 0.5, "Variable.__init__"
    assert state.initializer_of(kernel) is not None, "Variable.__init__"
    assert state.initializer_of(ready) is None, "stateless_scope"
    with keras.StatelessScope(), pytest.raises(ValueError, match="stateless scope"):
        keras.Variable(0.5)


def test_variables_are_made_without_values_and_get_them_later():
    keras.utils.set_random_seed(1)
    expected = layers.Dense(3)
    expected.build((None, 4))
    made = []
    keras.utils.set_random_seed(1)
    with state.variables_without_values(made) as assigned:
        layer = layers.Dense(3)
        layer.build((None, 4))
        layer.bias.assign(np.ones(3))
    assert made == layer.variables, "uninitialized_variables"
    assert list(assigned) == [id(layer.bias)], "StatelessScope.state_mapping"
    with keras.StatelessScope():  # which initializes what was made inside, at its end
        pass
    assert all(map(state.initializer_of, made)), "uninitialized_variables"
    assert isinstance(state.initializer_of(layer.kernel), keras.initializers.Initializer)
    state.initialize(layer.kernel)
    assert state.initializer_of(layer.kernel) is None
    np.testing.assert_array_equal(layer.kernel.numpy(), expected.kernel.numpy())
    state.give_value(layer.bias, np.ones(3))
    double = keras.Variable(np.zeros(()), dtype="float64")
    state.give_value(double, 1.1)
    assert double.numpy() == 1.1
    np.testing.assert_array_equal(layer.get_weights()[1], np.ones(3))
