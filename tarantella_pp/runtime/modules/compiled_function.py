"""Compiled functions that cost little to call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


class CompiledFunction:
    """A function compiled for one signature, called with flat tensors.

    `tf.function` matches its arguments against signatures at every call, which takes half a
    millisecond: as long as a small stage computes. A stage always gets what it was compiled for,
    so this calls the compiled function directly, in a fifth of the time.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> None:
        traced = tf.function(function, input_signature=list(specs), autograph=False)
        self._concrete = traced.get_concrete_function()
        self._call = self._concrete.inference_fn.call_flat
        self._captured = list(self._concrete.captured_inputs)

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Calls the function; returns its tensors, flattened."""
        results = self._call(*tensors, *self._captured)
        return results if isinstance(results, list) else []  # TensorFlow gives `None` for nothing

    @classmethod
    def like(
        cls, function: Callable[..., Any], arguments: tuple[Any, ...], any_rows: bool = False
    ) -> CompiledFunction:
        """Compiles a function for nested arguments, `None` among them."""
        flat = tf.nest.flatten(arguments)

        def flattened(*tensors: tf.Tensor) -> Any:
            given = iter(tensors)
            filled = [None if value is None else next(given) for value in flat]
            return function(*tf.nest.pack_sequence_as(arguments, filled))

        return cls(flattened, [_spec(t, any_rows) for t in flat if t is not None])


def _spec(tensor: tf.Tensor, any_rows: bool) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]] if any_rows else tensor.shape, tensor.dtype)


def dense_tensors(arguments: tuple[Any, ...]) -> list[tf.Tensor]:
    """The tensors in nested arguments, in the order in which `CompiledFunction.like` takes them."""
    return [value for value in tf.nest.flatten(arguments) if value is not None]


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Keeps TensorFlow from optimizing functions that are first called in here.

    That takes longer than a function computes that is called a few times with a few samples.
    """
    before = tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})
