"""`fit`, `evaluate` and `predict` as all ranks call them: each takes its rows, one prints.

What a model's class puts around Keras' loops, and around `compile`, stays: a `fit` that prepares
the data runs as it is, with the user's own model, and only what it calls is another loop::

    PipelineModel.fit(strings) -> Task.fit(strings) -> keras.Model.fit(token ids)
                                                       `- the pipeline's, of all ranks
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import keras

from tarantella_pp.callbacks import rank_rules
from tarantella_pp.internals.data import train_validation_split
from tarantella_pp.internals.optimizers import settable_learning_rate
from tarantella_pp.runtime.comm.collective import collective, of_keras_fit
from tarantella_pp.runtime.data_adapter import (
    GivenData,
    data_made_of,
    shared_adapter,
    shared_adapters,
)
from tarantella_pp.runtime.engine import predict_function, step_function

_METHODS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "compile",
)  # fmt: skip
# What the launcher says of its own output: "0" where that is a file.
_TERMINAL = "TNT_TERMINAL"
_DATA = ("x", "y", "sample_weight", "validation_data", "class_weight")


def _shown_by(engine: Any, verbose: str | int) -> str | int:
    """What this rank shows: one of them a bar, or in a file a line for each epoch."""
    if engine.communicator.prints and verbose == "auto" and os.environ.get(_TERMINAL) == "0":
        return 2
    return verbose if engine.communicator.prints else 0


def surrounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has a method run within the one of the wrapped model's class, if that has one."""
    name = method.__name__

    @functools.wraps(method)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        plain = model._wrapped
        own = getattr(type(plain), name)
        # Without data, another rank reads them.
        reads = name == "compile" or (args[0] if args else kwargs.get("x", 0)) is not None
        if own is getattr(keras.Model, name) or of_keras_fit(kwargs) or not reads:
            return method(model, *args, **kwargs)
        data = [args, {key: kwargs[key] for key in _DATA if key in kwargs}]
        with _instead_of_keras(plain, model), data_made_of(data):
            return own(plain, *args, **kwargs)

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

    methods = (name for name in _METHODS if hasattr(getattr(type(model), name), "__wrapped__"))
    ours: dict[str, Any] = {name: instead(name) for name in methods}
    with mock.patch.multiple(keras.Model, **ours):
        yield


# It is put before classes of models, Functional or not.
_AnyModel: Any = object


# What optimizers of all ranks have alike when a call begins; a rate is NaN where a schedule sets it
_OF_OPTIMIZER: Mapping[str, Callable[..., Any]] = {
    "learning_rate": lambda given: settable_learning_rate(given["self"]),
    "iterations": lambda given: int(
        getattr(getattr(given["self"], "optimizer", None), "iterations", 0)
    ),
}


class TrainingLoops(_AnyModel):
    """Keras' own loops over data; each rank gets its part."""

    _engine: Any  # an `Engine` of a pipeline, or the `ReplicaSteps` of a model with its own steps
    _wrapped: keras.Model  # the user's own

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compiles the model anew, if its class leaves that to Keras; all ranks must call it."""
        if type(self._wrapped).compile is not keras.Model.compile:
            super().compile_from_config(config)  # which says so
            return
        given = keras.saving.deserialize_keras_object(config)
        given.pop("jit_compile", None)  # which Keras has resolved
        self.compile(**given)

    def make_train_function(self, force: bool = False) -> None:
        """Builds this rank's training step; called by Keras' own loops."""
        self._engine.weights.refresh()
        if force or self.train_function is None:
            self.train_function: Any = step_function(self, self._engine.train)

    def make_test_function(self, force: bool = False) -> None:
        """Builds this rank's evaluation step; called by Keras' own loops."""
        self._engine.weights.refresh()
        if force or self.test_function is None:
            self.test_function: Any = step_function(self, self._engine.test)

    def make_predict_function(self, force: bool = False) -> None:
        """Builds this rank's prediction step; called by Keras' own loops."""
        self._engine.weights.refresh()
        self.predict_function = predict_function(self._engine)

    @surrounded
    @collective(
        "epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq",
        callbacks=lambda given: rank_rules.kinds_of_all_ranks(given["callbacks"]),
        **_OF_OPTIMIZER,
    )  # fmt: skip
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Trains the model; takes and returns what `keras.Model.fit` does.

        Arrays that all ranks have are read by all, each its own rows; they must be the same, and
        must not be changed during the call. Other data are read by rank 0 only, which sends the
        others their parts; so are arrays if other ranks pass `None`. Only the last rank shows
        progress. Logs, and with them the history, are the same on every rank.
        """
        engine = self._engine
        callbacks = rank_rules.with_trace(callbacks, self, os.environ)
        engine.record(None)
        engine.check_alike()

        def find() -> list[GivenData | None]:
            data, held_out = (x, y, sample_weight), validation_data
            if validation_split and held_out is None:
                data, held_out = train_validation_split(data, validation_split)
            options = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}
            first = GivenData(data, {**options, "shuffle": shuffle, "class_weight": class_weight})
            if held_out is None:
                return [first, None]
            size = validation_batch_size or batch_size
            parts = keras.utils.unpack_x_y_sample_weight(held_out)
            options = {"batch_size": size, "steps_per_epoch": validation_steps}
            return [first, GivenData(parts, options)]

        checkpoint = rank_rules.checkpoint_of(callbacks)
        train, validation = shared_adapters(engine, find, describe=checkpoint is not None)
        if checkpoint is not None:
            checkpoint.begin(
                self, train, initial_epoch=initial_epoch, epochs=epochs,
                steps_per_epoch=steps_per_epoch, shuffle=bool(shuffle),
            )  # fmt: skip
        callbacks = rank_rules.callbacks_of_rank(callbacks, self, checkpoint)
        with contextlib.nullcontext() if checkpoint is None else checkpoint.attached():
            history = keras.Model.fit(
                self,
                train,
                epochs=epochs,
                verbose=_shown_by(engine, verbose),
                callbacks=callbacks,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )
        engine.share_metrics()  # of an epoch that was cut short
        engine.check_alike()
        return history

    @surrounded
    @collective("steps")
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluates the model; takes and returns what `keras.Model.evaluate` does, on all ranks."""
        engine = self._engine
        if not kwargs:
            x = shared_adapter(engine, x, y, sample_weight, batch_size, steps)
            callbacks = rank_rules.callbacks_of_rank(callbacks, self)
        logs = keras.Model.evaluate(
            self,
            x,
            verbose=_shown_by(engine, verbose),
            steps=steps,
            callbacks=callbacks,
            return_dict=return_dict,
            **kwargs,
        )
        engine.share_metrics()
        return logs

    @surrounded
    @collective("steps")
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predicts; takes and returns what `keras.Model.predict` does, on all ranks."""
        engine = self._engine
        return keras.Model.predict(
            self,
            shared_adapter(engine, x, None, None, batch_size, steps),
            verbose=_shown_by(engine, verbose),
            steps=steps,
            callbacks=rank_rules.callbacks_of_rank(callbacks, self),
        )

    @surrounded
    @collective(**_OF_OPTIMIZER)
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one batch, the same on all ranks, or `None` on all but rank 0."""
        class_weight = None if x is None else class_weight  # rank 0 has the classes
        return keras.Model.train_on_batch(self, x, y, sample_weight, class_weight, return_dict)

    @surrounded
    @collective()
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates one batch, the same on all ranks, or `None` on all but rank 0."""
        return keras.Model.test_on_batch(self, *args, **kwargs)

    @surrounded
    @collective()
    def predict_on_batch(self, x: Any) -> Any:
        """Predicts one batch, the same on all ranks, or `None` on all but rank 0."""
        return keras.Model.predict_on_batch(self, x)
