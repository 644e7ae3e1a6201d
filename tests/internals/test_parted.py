"""What cutting a layer by columns needs of Keras' variables and layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals import parted
from tarantella_pp.internals.state import initialize

RNG = np.random.default_rng(0)


FLOATS, WORDS = RNG.normal(size=(4, 3)), RNG.integers(-9, 9, (4, 3))
ROWS = keras.layers.ReversibleEmbedding


@pytest.mark.parametrize(
    ("layer", "x", "back"),
    [
        (keras.layers.Dense(7, "softmax", bias_initializer="uniform"), FLOATS, False),
        (keras.layers.Embedding(9, 7, mask_zero=True), WORDS, False),
        (ROWS(9, 3, mask_zero=True), WORDS, False),
        (ROWS(9, 3, mask_zero=True), FLOATS, True),
        (ROWS(9, 3, tie_weights=False, logit_soft_cap=0.1), FLOATS, True),
    ],
)
def test_the_parts_of_a_layer_compute_what_it_does(layer, x, back):
    given = keras.Input(x.shape[1:], dtype=str(x.dtype))
    how = {"reverse": True} if back else {}
    expected = keras.Model(given, layer(given, **how)).predict(x, verbose=0)
    network = parted.cut(layer, given, 3, back=back)
    assert network is parted.cut(layer, given, 3, back=back)
    parts = [v for part in network.layers for v in part.variables]
    assert parted.wholes(parts) == layer.variables
    for whole in layer.variables:
        own = [part for part in parts if parted.whole_of(part) is whole]
        assert [part._value for part in own] == [None] * 3, "variables_without_values"
        assert {part.path for part in own} == {whole.path}, "_path"
        values = whole.numpy()
        for part in own:  # as `deferred_init` leaves them
            part._initializer.whole = keras.Variable(lambda *_, v=values, **__: v, whole.shape)
            part._initializer.whole._initializer = lambda *_, v=values, **__: v
            initialize(part)
            part._columns.whole = whole
        parted.part_variable(whole, own)
        np.testing.assert_array_equal(whole.numpy(), values, err_msg="value, _value")
    found = network.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    masks = [getattr(made(x), "_keras_mask", None) for made in (network, layer)]
    if x is WORDS:
        np.testing.assert_array_equal(*masks)
        for others in (x + 9, x - 9):  # as Keras does
            with pytest.raises(tf.errors.InvalidArgumentError):
                network(others)


def test_a_variable_in_parts_is_written_and_frozen_as_one():
    layer = keras.layers.Dense(5)
    given = keras.Input((3,))
    layer(given)
    network = parted.cut(layer, given, 2)
    parts = [part.kernel for part in network.layers if isinstance(part, keras.layers.Dense)]
    value = RNG.normal(size=(3, 5)).astype("float32")
    layer.kernel.trainable = False
    parted.part_variable(layer.kernel, parts)
    assert not any(part.trainable for part in parts), "_trainable"
    layer.kernel.trainable = True
    assert all(part.trainable for part in parts), "trainable"
    for part, columns in zip(parts, (value[:, :2], value[:, 2:]), strict=True):
        part._initializer = None
        part._initialize(columns * 0)
    layer.kernel.assign(value)
    np.testing.assert_array_equal(layer.kernel.numpy(), value)
    np.testing.assert_array_equal(layer(np.eye(3)), value)
    with keras.StatelessScope(state_mapping=[(layer.kernel, keras.ops.ones((3, 5)))]):
        assert float(keras.ops.sum(layer.kernel.value)) == 15.0, "in_stateless_scope"
    with pytest.raises(ValueError, match="must match"):
        layer.kernel.assign(value[:2])
    with pytest.raises(ConfigurationError, match="in parts, which the model by itself cannot"):
        _ = layer.kernel.handle
    assert parted.keys_of([layer.bias, *parts]) == ["0", "1/0:2", "1/2:5"]
    np.testing.assert_array_equal(parted.columns_in(value, "2:5"), value[:, 2:5])
    np.testing.assert_array_equal(parted.columns_in(value, "rows 1:3"), value[1:3])
    np.testing.assert_array_equal(parted.columns_in(value, ""), value)
    for names in (("2:5", "0:2"), ("rows 1:3", "rows 0:1")):
        cut = {name: parted.columns_in(value, name) for name in names}
        np.testing.assert_array_equal(parted.put_together(cut), value)
