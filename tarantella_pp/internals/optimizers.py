"""The private names of Keras that an optimizer's steps need."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


def parts_of(optimizer: Any) -> list[Any]:
    """An optimizer and those in it, which it wraps or delegates weights to."""
    inner: Sequence[Any] = ()
    if scales_dynamically(optimizer):
        inner = [optimizer.inner_optimizer]
    elif isinstance(optimizer, keras.optimizers.MultiOptimizer):
        inner = optimizer.optimizers
    return [optimizer, *(part for other in inner for part in parts_of(other))]


def copied(optimizer: Any, **options: Any) -> Any:
    """Another one of its class that has trained nothing, with some of its options changed."""
    try:
        made = type(optimizer).from_config(dict(optimizer.get_config()))
    except Exception as error:  # its config leaves out what its __init__ takes, or has none
        if optimizer.built:
            raise
        made, strategy = object.__new__(type(optimizer)), optimizer._distribution_strategy
        memo = {id(optimizer): made, id(strategy): strategy}  # there is one strategy only
        try:
            vars(made).update({name: copy.deepcopy(v, memo) for name, v in vars(optimizer).items()})
        except Exception:
            raise error from None
    vars(made).update({name: options[name] for name in options.keys() & vars(made)})
    return made


def delegates_of(optimizer: Any, weights: Sequence[Any]) -> list[Any]:
    """The optimizers that a `MultiOptimizer` delegates weights to; none of another one."""
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return []
    return list(dict.fromkeys(optimizer._optimizer_map(weight) for weight in weights))


def excludes(optimizer: Any, weight: Any) -> bool:
    """Whether a weight was given to `exclude_from_weight_decay` itself, not by its name."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    return getattr(weight._value, "_unique_id", weight.path) in excluded


def scales_dynamically(optimizer: Any) -> bool:
    """Whether an optimizer halves and doubles the scale of the loss by what gradients come out."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def wrapped_in(optimizer: Any) -> Any:
    """The optimizer whose options count: the one in a `LossScaleOptimizer`, or itself."""
    return optimizer.inner_optimizer if scales_dynamically(optimizer) else optimizer


def with_loss_scaling(optimizer: Any, policy: str) -> Any:
    """Wraps an optimizer as `keras.Model.compile` does for a dtype policy (`auto_scale_loss`)."""
    if optimizer is None or policy != "mixed_float16" or scales_dynamically(optimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")


def loss_scale(optimizer: Any) -> tf.Tensor | None:
    """What the gradients of a step are multiplied with; `None` for nothing."""
    if optimizer is None:
        return None
    one = tf.ones((), keras.config.floatx())
    scaled = optimizer.scale_loss(one)
    return None if scaled is one else tf.convert_to_tensor(scaled)


def count_step(optimizer: Any) -> None:
    """Counts a step that updates nothing, for the sake of learning-rate schedules."""
    if scales_dynamically(optimizer):
        optimizer.apply([], [])  # its scale, and nothing of the optimizer in it
        inner = optimizer.inner_optimizer
        keras.ops.cond(optimizer.check_finite([]), lambda: count_step(inner), lambda: None)
        return
    if isinstance(optimizer, keras.optimizers.Nadam) and optimizer.built:
        optimizer._backend_update_step([], [], optimizer.learning_rate)  # its product of momenta
    optimizer._iterations.assign_add(1)


def settable_learning_rate(model: Any) -> float:
    """The learning rate that callbacks may change; NaN without one, or where a schedule sets it."""
    optimizer = wrapped_in(getattr(model, "optimizer", None))
    rate = getattr(optimizer, "_learning_rate", None)
    return float(rate) if isinstance(rate, keras.Variable) else math.nan


def is_keras_optimizer(optimizer: Any) -> bool:
    """Returns whether an optimizer is one of Keras' own, and not a subclass."""
    return getattr(keras.optimizers, type(optimizer).__name__, None) is type(optimizer)


def clips_by_norm(optimizer: Any, has_parts: bool) -> bool:
    """Whether gradients are clipped by the norm of all, or of weights that ranks have in parts."""
    inner = wrapped_in(optimizer)
    by_weight = has_parts and getattr(inner, "clipnorm", None)
    return bool(by_weight or getattr(inner, "global_clipnorm", None))


def summands(
    optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any], clips: bool
) -> tf.Tensor:
    """What a step needs to know of some gradients: whether one is not finite, the squares of each.

    Squares are added up in the order of the model's weights, whatever rank has which.
    """
    inner, infinite = wrapped_in(optimizer), tf.zeros((), tf.float64)
    squares = [infinite] * len(weights)
    if scales_dynamically(optimizer):
        infinite = 1.0 - tf.cast(optimizer.check_finite(gradients), tf.float64)
    # Clipping by a norm looks at gradients unscaled, or at their means over several steps.
    for place, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        if not clips or gradient is None or weight.overwrite_with_gradient:
            continue
        if scales_dynamically(optimizer):
            gradient = keras.ops.divide(gradient, optimizer.dynamic_scale)
        if inner.loss_scale_factor is not None:
            gradient = gradient / inner.loss_scale_factor
        if inner.gradient_accumulation_steps:
            earlier = inner._accumulated_gradients[inner._get_variable_index(weight)]
            gradient = (gradient + earlier) / inner.gradient_accumulation_steps
        seen = gradient if inner.global_clipnorm else _values(gradient)
        squares[place] = tf.cast(keras.ops.sum(keras.ops.square(seen)), tf.float64)
    return tf.stack([infinite, *squares])


@contextlib.contextmanager
def with_norms(optimizer: Any, all_finite: tf.Tensor, squares: tf.Tensor | None) -> Iterator[None]:
    """Has an optimizer scale and clip some gradients as one that is given all of them does.

    `squares` has for each of them the sum of squares that it is clipped by.
    """
    inner = wrapped_in(optimizer)

    def clip(gradients: Sequence[Any]) -> list[Any]:
        # As Keras does. What is not finite stays so, and makes all gradients NaN.
        most, norms = inner.global_clipnorm or inner.clipnorm, tf.sqrt(squares)
        scales = most / tf.maximum(norms, most)
        if inner.global_clipnorm:
            scales = most * tf.minimum(1 / norms, 1 / most) + (norms - norms)
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        pairs = zip(gradients, tf.unstack(scales), strict=True)
        return [None if g is None else scaled(g, tf.cast(scale, g.dtype)) for g, scale in pairs]

    if scales_dynamically(optimizer):
        optimizer.check_finite = lambda _: all_finite
    if squares is not None:
        inner._clip_gradients = clip
    try:
        yield
    finally:
        vars(optimizer).pop("check_finite", None)
        vars(inner).pop("_clip_gradients", None)


def _values(gradient: Any) -> Any:
    """The numbers of a gradient; of slices those of each, as `tf.clip_by_norm` looks at them."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def scaled(gradient: Any, factor: Any) -> Any:
    """A gradient, if there is one, multiplied with a number or a tensor of its dtype."""
    if gradient is None:
        return None
    values = _values(gradient) * tf.convert_to_tensor(factor, gradient.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
