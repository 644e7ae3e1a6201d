"""The private parts of Keras that running a user's own training step relies on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tarantella_pp.keras_internals import step_hooks

pytestmark = pytest.mark.keras

ADVICE = (
    f"Keras {keras.__version__} has changed a private part that "
    "tarantella_pp/keras_internals/step_hooks.py uses: "
)


class Halved(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([gradient / 2 for gradient in grads], trainable_variables)


def optimizers():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return [keras.optimizers.Adam(), scaled, Halved()]


@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda o: type(o).__name__)
def test_updates_are_taken_once_and_only_for_a_while(optimizer):
    weight, taken = keras.Variable(np.ones(3)), []
    with step_hooks.updates_taken(lambda *given: taken.append(given)):
        optimizer.apply_gradients([(keras.ops.ones(3), weight)])
    assert [given[0] for given in taken] == [optimizer], ADVICE + "BaseOptimizer.apply"
    assert np.array_equal(weight, np.ones(3))
    assert np.array_equal(taken[0][1], [np.ones(3)])
    variables = step_hooks.variables_for(optimizer, taken[0][2])
    assert variables == [weight] == step_hooks.variables_for(optimizer, None), (
        ADVICE + "Optimizer._trainable_variables"
    )
    optimizer.apply_gradients([(keras.ops.ones(3), weight)])
    assert len(taken) == 1
    assert int(optimizer.iterations) == 1


def test_scaled_losses_are_weighted_once_and_only_for_a_while():
    bare, scaled = optimizers()[:2]
    with step_hooks.scaled_losses_weighted(lambda loss: loss / 4):
        assert bare.scale_loss(3.0) == 3.0, ADVICE + "BaseOptimizer.scale_loss"
        assert float(scaled.scale_loss(3.0)) == 3.0 * 2**13, ADVICE + "scale_loss"
    assert float(scaled.scale_loss(3.0)) == 3.0 * 2**15


class Both(keras.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.inner = keras.metrics.Mean()

    def result(self):
        return {"inner": self.inner.result()}


def test_results_are_told_of_the_metric_that_is_asked():
    told = []
    alone, both = keras.metrics.Mean(), Both()
    with step_hooks.results_told(lambda *given: told.append(given)):
        found = [alone.result(), both.result()]
    assert [metric for metric, _ in told] == [alone, both], ADVICE + "Metric.result"
    assert all(value is one for (_, value), one in zip(told, found, strict=True))
    alone.result()
    assert len(told) == 2
