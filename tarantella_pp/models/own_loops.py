"""What a model's class puts around Keras' loops, and around `compile`: it stays.

A class whose `fit` prepares the data, and then calls Keras' `fit` with the prepared data, runs
as it is, with the user's own model; only what it calls is another loop::

    PipelineModel.fit(strings) -> Task.fit(strings) -> keras.Model.fit(token ids)
                                                       `- the pipeline's, of all ranks
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras

from tarantella_pp.runtime.comm.collective import of_keras_fit
from tarantella_pp.runtime.data_adapter import data_made_of

_METHODS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "compile",
)  # fmt: skip
_DATA = ("x", "y", "sample_weight", "validation_data", "class_weight")


def surrounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has a method run within that of the wrapped model's class, if it has one."""
    name = method.__name__

    @functools.wraps(method)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        plain = model._wrapped
        own = getattr(type(plain), name)
        if own is getattr(keras.Model, name) or of_keras_fit(kwargs):
            return method(model, *args, **kwargs)
        if name != "compile" and (args[0] if args else kwargs.get("x")) is None:
            return method(model, *args, **kwargs)  # another rank reads the data
        data = [args, {key: kwargs[key] for key in _DATA if key in kwargs}]
        with _instead_of_keras(plain, model), data_made_of(data):
            return own(plain, *args, **kwargs)

    run.__wrapped__ = method  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _instead_of_keras(plain: Any, model: Any) -> Iterator[None]:
    """Lets what a model's class calls of Keras be of another model."""

    def instead(name: str) -> Callable[..., Any]:
        of_keras, ours = getattr(keras.Model, name), getattr(type(model), name).__wrapped__

        @functools.wraps(of_keras)
        def run(which: Any, *args: Any, **kwargs: Any) -> Any:
            if which is plain:
                return ours(model, *args, **kwargs)
            return of_keras(which, *args, **kwargs)

        return run

    ours: dict[str, Any] = {name: instead(name) for name in _METHODS}
    with mock.patch.multiple(keras.Model, **ours):
        yield
