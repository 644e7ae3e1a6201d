"""The private names of Keras that running a user's own training step needs, all in this one file.

Written against Keras 3.14 and 3.15; `tests/keras_internals/test_step_hooks.py` says which of them a
new version of Keras has changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer


@contextlib.contextmanager
def updates_taken(take: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Hands over what optimizers are asked to apply, which then do not apply it."""

    def instead(kind: type) -> Any:
        @functools.wraps(kind.__dict__["apply"])
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            take(optimizer, grads, trainable_variables)

        return apply

    with _replaced(BaseOptimizer, "apply", instead):
        yield


@contextlib.contextmanager
def results_told(told: Callable[[Any, Any], None]) -> Iterator[None]:
    """Tells what metrics give as their results."""
    depth = 0

    def instead(kind: type) -> Any:
        original = kind.__dict__["result"]

        @functools.wraps(original)
        def result(metric: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                value = original(metric)
            finally:
                depth -= 1
            if not depth:
                told(metric, value)
            return value

        return result

    with _replaced(keras.metrics.Metric, "result", instead):
        yield


@contextlib.contextmanager
def scaled_losses_weighted(weighted: Callable[[Any], Any]) -> Iterator[None]:
    """Weights losses that optimizers scale, and leaves those that they do not scale."""
    depth = 0

    def instead(kind: type) -> Any:
        original = kind.__dict__["scale_loss"]

        @functools.wraps(original)
        def scale_loss(optimizer: Any, loss: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                scaled = original(optimizer, loss)
            finally:
                depth -= 1
            return scaled if depth or scaled is loss else weighted(scaled)

        return scale_loss

    with _replaced(BaseOptimizer, "scale_loss", instead):
        yield


def variables_for(optimizer: Any, trainable_variables: Any) -> list[Any]:
    """The variables of gradients that an optimizer is given; it is built for them if it is not."""
    if trainable_variables is None:
        return list(optimizer._trainable_variables)
    variables = list(trainable_variables)
    if not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True
    return variables


@contextlib.contextmanager
def _replaced(base: type, name: str, instead: Callable[[type], Any]) -> Iterator[None]:
    """Puts another method in the place of that of a class and of all that override it."""
    every = dict.fromkeys(part for kind in [base, *_below(base)] for part in kind.__mro__)
    kinds = [kind for kind in every if name in vars(kind)]  # mixins among them
    originals = {kind: vars(kind)[name] for kind in kinds}
    replacements = {kind: instead(kind) for kind in kinds}
    try:
        for kind, method in replacements.items():
            setattr(kind, name, method)
        yield
    finally:
        for kind, method in originals.items():
            setattr(kind, name, method)


def _below(base: type) -> Iterator[type]:
    below: list[type] = base.__subclasses__()
    for kind in below:
        yield kind
        yield from _below(kind)
