"""Models with a `train_step` of their own, which `tnt.Model` runs on all ranks."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.callbacks.checkpoint import Checkpoint
from tarantella_pp.callbacks.rank_rules import listed
from tarantella_pp.custom_steps.replica_steps import ReplicaSteps
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files.file_replacement import replace_file, replace_shards
from tarantella_pp.internals.functional import network_of, own_metrics, runs_its_graph
from tarantella_pp.models import model_validation
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.runtime.comm.collective import collective, contents_of, named, on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data.data_adapter import predict_function, step_function


def has_own_steps(model: Any) -> bool:
    """Whether a model computes its steps in a way of its own, in which replicas must run them."""
    if not isinstance(model, keras.Model) or isinstance(model, TrainingLoops):
        return False
    is_graph = network_of(model) is not None and runs_its_graph(model)
    sequential = isinstance(model, keras.Sequential)
    meters = bool(own_metrics(model)) and not is_graph and not sequential
    return meters or bool(model_validation.own_steps_of(model))


def with_replicas(model: Any, ranks: Communicator, gradient_dtype: str | None = None) -> Any:
    """Makes a model that runs another one's steps on all ranks, with a share of each batch on each.

    It has all attributes in common with the user's model, which stays one of the user's class: its
    steps run as they are, and it is saved as ever.
    """
    model_validation.check_backend()
    model_validation.check_strategy(model)
    if ranks.size == 1:
        return model
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    kind: Any = type(own.__name__, (OwnStepModel, own), {**names, "_plain": model})
    model._engine = ReplicaSteps(model, ranks, gradient_dtype)
    model.train_function = model.test_function = model.predict_function = None
    replicas = object.__new__(kind)
    object.__setattr__(replicas, "__dict__", vars(model))
    return replicas


class OwnStepModel(TrainingLoops):
    """Comes before the class of a model whose own steps are run on all ranks."""

    _engine: ReplicaSteps
    _plain: keras.Model

    @property
    def plan(self) -> Any:
        """None: nothing of a step of the user's is cut or planned."""
        raise ConfigurationError(
            f"Model '{self.name}' runs steps of its own, each rank with its share of a batch: "
            "there is nothing to plan."
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training as the user's class does; all ranks must call it."""
        model_validation.check_strategy(self)
        told = {name: keras.tree.map_structure(named, value) for name, value in kwargs.items()}
        given = keras.tree.map_structure(named, args)
        with self._engine.communicator.call("compile", arguments=given, **told):
            super().compile(*args, **kwargs)
            self._engine.forget_compilation()
        if self.run_eagerly and self._engine.prints:
            warnings.warn(
                "Replicas compile the steps of a model, and ignore run_eagerly=True: the numbers "
                "are the same. To debug a step line by line, train in one process.",
                UserWarning,
                stacklevel=2,
            )

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; takes and returns what `keras.Model.fit` does, as `tnt.Model.fit`."""
        given = inspect.signature(keras.Model.fit).bind(self, *args, **kwargs).arguments
        for callback in listed(given.get("callbacks")):
            if isinstance(callback, (Checkpoint, keras.callbacks.BackupAndRestore)):
                raise ConfigurationError(
                    f"Callback {type(callback).__name__} keeps the state of a pipeline, and model "
                    f"'{self.name}' runs steps of its own. Use keras.callbacks.ModelCheckpoint."
                )
        with self._engine.communicator.call("fit"):
            self._engine.check_alike()
            return super().fit(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> None:
        """Builds this rank's training step; called by Keras' own loops."""
        if force:
            self._engine.forget_compilation()
        if force or self.train_function is None:
            self.train_function: Any = step_function(
                self._engine, self._engine.train, self.steps_per_execution
            )

    def make_test_function(self, force: bool = False) -> None:
        """Builds this rank's evaluation step; called by Keras' own loops."""
        if force or self.test_function is None:
            self.test_function: Any = step_function(
                self._engine, self._engine.test, self.steps_per_execution
            )

    def make_predict_function(self, force: bool = False) -> None:
        """Builds this rank's prediction step; called by Keras' own loops."""
        self.predict_function = predict_function(self._engine)

    @collective("overwrite")
    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model as plain Keras does; all ranks must call it, the last one writes."""
        self._write("save", filepath, overwrite, replace_file, kwargs)

    @collective("overwrite")
    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """Saves the weights as plain Keras does; all ranks must call it, the last one writes."""
        replace = replace_file if max_shard_size is None else replace_shards
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        self._write("save_weights", filepath, overwrite, replace, options)

    @collective("skip_mismatch", contents=lambda given: contents_of(given["filepath"]))
    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Loads weights as plain Keras does; all ranks must call it, and each reads the file."""
        self._plain.load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _write(
        self,
        method: str,
        filepath: Any,
        overwrite: bool,
        replace: Callable[[Path, Callable[[Path], None]], None],
        options: Mapping[str, Any],
    ) -> None:
        """Lets the last rank write a file, or each rank its own if that is open."""
        if not isinstance(filepath, (str, os.PathLike)):
            getattr(self._plain, method)(filepath, **options)
            return
        path, ranks = Path(filepath), self._engine.communicator

        def work() -> None:
            if path.exists() and not overwrite:
                raise ConfigurationError(
                    f"File '{path}' exists. Received: overwrite=False. Choose another name, or "
                    "pass overwrite=True."
                )
            replace(path, lambda draft: getattr(self._plain, method)(draft, **options))

        on_one_rank(ranks, ranks.size - 1, method, work)
