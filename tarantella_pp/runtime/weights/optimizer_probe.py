"""Whether an optimizer treats each weight by itself, as ranks need it: found by trying."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import (
    copied,
    delegates_of,
    excludes,
    is_keras_optimizer,
    wrapped_in,
)
from tarantella_pp.internals.parted import parts_of
from tarantella_pp.internals.state import stand_in
from tarantella_pp.internals.training import written_by
from tarantella_pp.runtime.weights.shared_weights import Array

_SHAPES = ((3, 4), (5,), (4, 2))
# Of parts: a bias, and a matrix large enough for what only large ones get
_CUT_SHAPES = ((5,), (160, 130))
# Of the gradients of parts: what an optimizer clips, or does with a NaN, shows in some only
_SCALES = ((10.0, 10.0), (1e-6, 1e-6), (1e6, 10.0), (np.nan, 10.0))
_STEPS = 3
# Weights, of the first and of the last layers, whose graph is made: of hundreds that takes seconds.
_MOST = 24
_TOLERANCE = 1e-5


def check_division(optimizer: Any, weights: Sequence[Any], num_ranks: int) -> None:
    """Refuses optimizers that would do something else on several ranks than on one."""
    _check_columns(optimizer, weights)
    if optimizer is None or num_ranks == 1:
        return
    delegates = delegates_of(wrapped_in(optimizer), weights)
    for part in dict.fromkeys([optimizer, wrapped_in(optimizer), *delegates]):
        if not is_keras_optimizer(part) and not treats_weights_apart(part, weights):
            raise ConfigurationError(
                f"Optimizer {type(part).__name__} looks at several weights at once, which are on "
                f"{num_ranks} ranks. Treat each weight by itself, or run all stages in one process."
            )
        if part in delegates and part.global_clipnorm:
            raise ConfigurationError(
                f"Optimizer {part.name} in {wrapped_in(optimizer).name} clips the gradients of "
                f"some weights by their common norm, and they are on {num_ranks} ranks. Received: "
                f"global_clipnorm={part.global_clipnorm} of an optimizer in a MultiOptimizer. Use "
                "clipnorm, which clips each by itself, or run all stages in one process."
            )


def _check_columns(optimizer: Any, weights: Sequence[Any]) -> None:
    """Refuses optimizers that would do something else with weights that are in parts."""
    parted = [weight for weight in weights if parts_of(weight)[0] is not weight]
    if not parted or optimizer is None:
        return
    if (part := looks_at_wholes(optimizer, parted)) is not None:
        raise ConfigurationError(
            f"Optimizer {part.name} does not treat each number of a weight by itself, and "
            f"stages have weight '{parted[0].path}' in parts. Received: optimizer="
            f"{type(part).__name__}. Compile the model before you wrap it: the plan leaves all "
            "layers whole then. Or use one such as Adam, and exclude weights by their names."
        )


def looks_at_wholes(optimizer: Any, weights: Sequence[Any]) -> Any:
    """The optimizer, or one in it, that trains parts of some weights in another way than all.

    Clipping by norms is left out where ranks know the norms of whole weights.
    """
    delegates = delegates_of(wrapped_in(optimizer), weights)
    for part in delegates or [wrapped_in(optimizer)]:
        apart = (part in delegates and part.clipnorm) or any(excludes(part, w) for w in weights)
        scales_tried = _SCALES[:1] if is_keras_optimizer(part) else _SCALES
        tried = itertools.product(_CUT_SHAPES, scales_tried)
        if apart or not all(_by_parts(part, shape, scales) for shape, scales in tried):
            return part
    return None


def _by_parts(optimizer: Any, shape: tuple[int, ...], scales: Sequence[float]) -> bool:
    """Tries two parts, of other rows and of other columns each."""
    rng = np.random.default_rng(0)
    values, gradients = rng.normal(size=shape), scales[1] * rng.normal(size=(_STEPS, *shape))
    gradients[..., 0] *= scales[0] / scales[1]
    half = [size // 2 for size in shape[:-1]]
    owns = [(), (*map(slice, half), slice(1)), (*(slice(n, None) for n in half), slice(1, None))]
    free: dict[str, Any] = {"clipnorm": None, "global_clipnorm": None}
    found = [
        _tried(optimizer, [values[own]], [gradients[(slice(None), *own)]], **free) for own in owns
    ]
    if any(isinstance(one, Exception) for one in found):
        return False
    whole = found[0].reshape(shape)
    return all(
        np.allclose(whole[own].ravel(), part, _TOLERANCE, 0.0, equal_nan=True)
        for own, part in zip(owns[1:], found[1:], strict=True)
    )


def treats_weights_apart(optimizer: Any, weights: Sequence[Any]) -> bool:
    """Whether steps for some weights, and steps for the others, are steps for all.

    What shows for large gradients, after many steps or by the names of weights, the graph shows.
    """
    return _treats_apart(optimizer) and not _reads_of_others(optimizer, weights)


def _reads_of_others(optimizer: Any, weights: Sequence[Any]) -> bool:
    """Whether a weight follows from another one or its gradient, in the graph of a step."""
    small = [stand_in(weight) for weight in [*weights[:_MOST], *weights[_MOST:][-_MOST:]]]
    try:
        graph = _graph_of_step(optimizer, small)
    except Exception:  # one that takes only larger weights, say, has been tried with such
        return False
    places = {id(weight.value.handle): i for i, weight in enumerate(small)}
    pairs = [(places.get(id(outer)), inner.name) for outer, inner in graph.captures]
    own = {name: 1 << place for place, name in pairs if place is not None}
    # By tensor: the weights that it follows from, as bits.
    follows = own | {tensor.name: 1 << i for i, tensor in enumerate(graph.inputs[: len(small)])}
    for op in 2 * graph.get_operations():  # what a step writes, the next one reads
        reads = [follows.get(tensor.name, 0) for tensor in op.inputs]
        bits = functools.reduce(operator.or_, reads, 0)
        each = reads if op.type == "IdentityN" else len(op.outputs) * [bits]
        made = zip((tensor.name for tensor in op.outputs), each, strict=False)
        follows |= dict(made) if reads else {}
        follows |= {tensor.name: bits for tensor in written_by(op)}
    return any(follows[name] != bit for name, bit in own.items())


def _graph_of_step(optimizer: Any, weights: Sequence[Any]) -> tf.Graph:
    """The graph in which a copy trains weights, without what ranks see to together."""
    together = ("clipnorm", "global_clipnorm", "gradient_accumulation_steps", "use_ema")
    copy = copied(optimizer, **dict.fromkeys(together))
    copy.build(weights)

    def step(*gradients: tf.Tensor) -> None:
        copy.apply_gradients(zip(gradients, weights, strict=True))

    specs = [tf.TensorSpec(weight.shape, weight.dtype) for weight in weights]
    return tf.function(step, autograph=False).get_concrete_function(*specs).graph


def _treats_apart(optimizer: Any) -> bool:
    """Tries it with a few weights; the norm of all gradients is known to ranks."""
    rng, places = np.random.default_rng(0), range(len(_SHAPES))
    values = [rng.normal(size=shape) for shape in _SHAPES]
    gradients = [10 * rng.normal(size=(_STEPS, *shape)) for shape in _SHAPES]
    found = [
        _tried(
            optimizer, [values[i] for i in own], [gradients[i] for i in own], global_clipnorm=None
        )
        for own in (places, *([i] for i in places))
    ]
    if not any(isinstance(one, Exception) for one in found):
        apart = np.allclose(found[0], np.concatenate(found[1:]), _TOLERANCE, 0.0)
        return apart and _clips_what_it_is_given(optimizer, values, gradients)
    error = next(one for one in found if isinstance(one, Exception))
    raise ConfigurationError(
        f"Optimizer {type(optimizer).__name__} cannot be tried out with other weights "
        f"({type(error).__name__}: {error}), as it must be for several ranks. Make "
        "`get_config` return what its __init__ takes, compile with an optimizer that has not "
        "trained, or run all stages in one process."
    ) from error


def _clips_what_it_is_given(
    optimizer: Any, values: Sequence[Array], gradients: Sequence[Array]
) -> bool:
    """Whether it clips by the norm of the gradients as they come, if by that of all."""
    if not (most := optimizer.global_clipnorm):
        return True
    squares = sum(np.sum(g.reshape(_STEPS, -1) ** 2, axis=1) for g in gradients)
    factors = np.minimum(1.0, most / np.sqrt(squares))
    clipped = [(g.T * factors).T for g in gradients]
    plain: dict[str, Any] = {"gradient_accumulation_steps": None, "loss_scale_factor": None}
    # Its config may leave the bound out.
    found = _tried(optimizer, values, gradients, global_clipnorm=most, **plain)
    expected = _tried(optimizer, values, clipped, global_clipnorm=None, **plain)
    return not isinstance(found, Exception) and np.allclose(found, expected, _TOLERANCE, 0.0)


def _tried(
    optimizer: Any, values: Sequence[Array], gradients: Sequence[Array], **options: Any
) -> Any:
    """What made-up weights become that a copy of the optimizer trains, or what its class raises."""
    try:
        weights = [keras.Variable(value) for value in values]
        copy = copied(optimizer, **options)
        copy.build(weights)
        for step in range(_STEPS):
            own = (keras.ops.convert_to_tensor(g[step], weights[0].dtype) for g in gradients)
            copy.apply_gradients(zip(own, weights, strict=True))
        return np.concatenate([np.ravel(weight.numpy()) for weight in weights])
    except Exception as error:
        return error
