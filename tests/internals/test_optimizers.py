"""The private parts of Keras that an optimizer's steps rely on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.internals import optimizers
from tests.helpers.training import in_precision

pytestmark = pytest.mark.keras


def scaled(inner, growth=2000):
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=8.0, dynamic_growth_steps=growth
    )


def test_optimizers_count_their_steps():
    for optimizer in (keras.optimizers.SGD(), scaled(keras.optimizers.SGD(), growth=1)):
        optimizer.build([keras.Variable(np.ones(3))])
        optimizers.count_step(optimizer)
        assert int(optimizer.iterations) == 1, "Optimizer._iterations"
    assert float(optimizer.dynamic_scale) == 16.0, "LossScaleOptimizer.apply([], [])"


def test_the_learning_rate_is_a_variable_or_a_schedule():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    advice = "Optimizer._learning_rate"
    assert math.isnan(optimizers.settable_learning_rate(keras.Sequential())), advice
    model.compile(keras.optimizers.SGD(0.25))
    assert optimizers.settable_learning_rate(model) == 0.25, advice
    model.optimizer.learning_rate = 0.5
    assert optimizers.settable_learning_rate(model) == 0.5, advice
    model.compile(scaled(keras.optimizers.SGD(0.125)))
    assert optimizers.settable_learning_rate(model) == 0.125
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    assert math.isnan(optimizers.settable_learning_rate(model)), advice


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_losses_are_scaled_for_the_policies_for_which_keras_scales_them(policy):
    with in_precision("float32", policy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    for optimizer in (keras.optimizers.SGD(), scaled(keras.optimizers.SGD())):
        model.compile(optimizer, "mse")
        ours = optimizers.with_loss_scaling(optimizer, policy)
        advice = "what Model.compile does with auto_scale_loss"
        assert type(ours) is type(model.optimizer), advice
        assert ours.name == model.optimizer.name, advice
        assert optimizers.wrapped_in(ours) is optimizers.wrapped_in(optimizer)


def test_the_scale_of_the_loss_is_that_of_this_step():
    assert optimizers.loss_scale(None) is None
    assert optimizers.loss_scale(keras.optimizers.SGD()) is None
    assert float(optimizers.loss_scale(keras.optimizers.SGD(loss_scale_factor=4.0))) == 4.0
    optimizer = scaled(keras.optimizers.SGD())
    assert float(optimizers.loss_scale(optimizer)) == 8.0, "scale_loss before build"
    optimizer.build([])
    optimizer.dynamic_scale.assign(2.0)
    assert float(optimizers.loss_scale(optimizer)) == 2.0, "dynamic_scale"


SUMS = {
    "clipped": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.5),
    "fixed scale": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.5, loss_scale_factor=8.0),
    "several steps": lambda: keras.optimizers.SGD(
        1.0, global_clipnorm=0.5, gradient_accumulation_steps=2
    ),
    "scaled": lambda: scaled(keras.optimizers.SGD(1.0, momentum=0.5), growth=2),
    "scaled and clipped": lambda: scaled(keras.optimizers.SGD(1.0, global_clipnorm=0.5)),
    "scaled, clipped, several steps": lambda: scaled(
        keras.optimizers.SGD(1.0, global_clipnorm=0.5, gradient_accumulation_steps=2), growth=3
    ),
}


@pytest.mark.parametrize("kind", SUMS)
def test_halves_of_a_model_make_the_step_of_the_whole(kind):
    """Once each knows the sums of both; in the third step one half is not finite."""
    start = [np.arange(6.0).reshape(2, 3) / 7, np.ones((4, 2))]
    whole, *halves = (SUMS[kind]() for _ in range(3))
    weights, parts = ([keras.Variable(value) for value in start] for _ in range(2))
    clips = optimizers.clips_by_norm(whole, has_parts=False)
    whole.build(weights)
    for half, weight in zip(halves, parts, strict=True):
        half.build([weight])
    for step in range(5):
        gradients = [keras.ops.cos(weight + step) * 8 for weight in weights]
        if kind != "fixed scale":  # of which Keras divides no slices
            gradients.append(tf.IndexedSlices(gradients.pop()[:3], [0, 2, 2], [4, 2]))
        if step == 2 and kind.startswith("scaled"):
            gradients[0] *= np.inf
        whole.apply(gradients, weights)
        totals = tf.add_n(
            [
                optimizers.summands(half, [gradient], [weight], clips)
                for half, gradient, weight in zip(halves, gradients, parts, strict=True)
            ]
        )
        squares = tf.reduce_sum(totals[1:], keepdims=True) if clips else None
        for half, gradient, weight in zip(halves, gradients, parts, strict=True):
            with optimizers.with_norms(half, totals[0] == 0, squares):
                half.apply([gradient], [weight])
    advice = "check_finite, _clip_gradients, _accumulated_gradients"
    for half, part, weight in zip(halves, parts, weights, strict=True):
        np.testing.assert_allclose(part.numpy(), weight.numpy(), rtol=1e-5, err_msg=advice)
        made = 5 - kind.startswith("scaled")
        updates = made // (optimizers.wrapped_in(whole).gradient_accumulation_steps or 1)
        assert int(half.iterations) == int(whole.iterations) == updates
        if optimizers.scales_dynamically(whole):
            assert float(half.dynamic_scale) == float(whole.dynamic_scale), advice
        assert not {"check_finite", "_clip_gradients"} & {
            *vars(half),
            *vars(optimizers.wrapped_in(half)),
        }


def test_optimizers_that_others_delegate_weights_to_are_known():
    first, second = keras.optimizers.SGD(), keras.optimizers.Adam()
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(first, {"b": second}))
    weights = [keras.Variable(np.ones(2), name=name) for name in "abb"]
    assert optimizers.delegates_of(several, weights) == [first, second], "_optimizer_map"
    assert set(optimizers.parts_of(scaled(several))[1:]) == {several, first, second}
    assert optimizers.delegates_of(first, weights) == []
