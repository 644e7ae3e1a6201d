"""Optimizers of the user's that look at several weights at once are refused on several ranks."""

import keras
import pytest
from keras import ops

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.probes.optimizer_probe import check_division, treats_weights_apart

pytestmark = pytest.mark.keras


class Halved(keras.optimizers.Adam):
    """Treats each weight by itself."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


class Normed(keras.optimizers.SGD):
    """Divides all gradients by their common norm."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(g**2) for g in grads))
        return super().apply([g / norm for g in grads], trainable_variables)


class Clipped(keras.optimizers.Adam):
    """Clips all gradients by their common norm, which few have."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(g**2) for g in grads))
        return super().apply([g * 1e4 / ops.maximum(norm, 1e4) for g in grads], trainable_variables)


class Skipping(keras.optimizers.Adam):
    """Skips what has a NaN."""

    def apply(self, grads, trainable_variables=None):
        finite = ops.all(ops.stack([ops.all(ops.isfinite(g)) for g in grads]))
        grads = [ops.where(finite, g, ops.zeros_like(g)) for g in grads]
        return super().apply(grads, trainable_variables)


class Unconfigured(keras.optimizers.SGD):
    def __init__(self, needed):
        super().__init__(0.1 * needed)


def test_those_that_treat_each_weight_by_itself_may_train_and_others_are_refused_by_name():
    kinds = [keras.optimizers.Adam, keras.optimizers.Adafactor, keras.optimizers.Lamb, Halved]
    for optimizer in [None, *(kind() for kind in kinds)]:
        check_division(optimizer, [], 2)
        assert optimizer is None or treats_weights_apart(optimizer)
        assert optimizer is None or not optimizer.built
    assert not treats_weights_apart(keras.optimizers.SGD(global_clipnorm=0.1))
    for kind in (Normed, Clipped, Skipping):
        name = f"{kind.__name__} looks at several weights.*2 ranks"
        with pytest.raises(ConfigurationError, match=name):
            check_division(kind(0.1), [], 2)
    with pytest.raises(ConfigurationError, match=r"Unconfigured cannot be tried.*get_config"):
        check_division(Unconfigured(1.0), [], 2)
