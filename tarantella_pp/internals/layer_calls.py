"""Calls of layers inside of a layer, handed over one by one: all private names that this needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

# Makes a call of a layer, given the way in which Keras makes it.
CallHandler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


def new_graph(name: str) -> Any:
    """A graph of TensorFlow, like a function's, to trace in."""
    return tf.__internal__.FuncGraph(name)


def repeats_itself(layer: Any) -> bool:
    """Whether the backward pass calls a layer anew (`keras.RematScope`)."""
    return layer._remat_mode is not None


@contextlib.contextmanager
def functions_inside(are_inlined: bool) -> Iterator[None]:
    """Has each `tf.function` run as its code, for it would keep placeholders for later calls."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(are_inlined)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def layer_calls(handler: CallHandler) -> Iterator[None]:
    """Hands the calls of layers to a handler, those in the graph that is the default now."""
    original, graph = keras.layers.Layer.__call__, tf.compat.v1.get_default_graph()

    @functools.wraps(original)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Inside of loops and branches the same code runs in other graphs.
        if tf.compat.v1.get_default_graph() is not graph:
            return original(layer, *args, **kwargs)
        return handler(original, layer, args, kwargs)

    with mock.patch.object(keras.layers.Layer, "__call__", call):
        yield


class GlueScope(keras.StatelessScope):  # type: ignore[misc]
    """Between the calls of layers: `read` gives values of variables, `None` for the true one.

    Nothing is written, so that another call of a layer reads what it read before, and losses that
    are added come to `add`.
    """

    def __init__(
        self, read: Callable[[Any], Any], write: Callable[[Any], None], add: Callable[[Any], None]
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._read, self._write, self._add = read, write, add

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable."""
        return self._read(variable)

    def add_update(self, update: Any) -> None:
        """Takes note that a variable would change."""
        self._write(update[0])

    def add_loss(self, loss: Any) -> None:
        """Takes note of a loss that a layer adds."""
        self._add(loss)
        super().add_loss(loss)
