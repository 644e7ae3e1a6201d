"""`Model` and `Sequential`: data parallelism alone, every rank trains the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.custom_steps.replica_steps import ReplicaState, ReplicaSteps
from tarantella_pp.errors import (
    ConfigurationError,
    UnsupportedModelError,
    checked_count,
    former_option,
)
from tarantella_pp.files import replace_file
from tarantella_pp.internals.functional import hides_its_graph, own_metrics, treat_like
from tarantella_pp.internals.model_files import hdf5_errors
from tarantella_pp.internals.state import class_before
from tarantella_pp.models import model_validation
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.runtime.comm.collective import collective, contents_of, named, on_one_rank
from tarantella_pp.runtime.comm.communicator import world

_FILES = (".keras", ".h5", ".hdf5")
# Options of a `PipelineModel` that one stage on each rank has not.
OF_STAGES = {"num_stages", "schedule", "balance", "wire_dtype", "num_replicas", "check_replicas"}


class Model(PipelineModel):
    """Trains a Keras model on all ranks; each computes its share of every batch.

    It is a `PipelineModel` of one stage, and every rank has a replica. Gradients are added up over
    the ranks before the optimizer sees them, so the numbers equal the wrapped model's in one
    process with the same batches, whatever the number of ranks. `batch_size` of `fit` counts the
    whole batch, over all ranks.

    Nothing is cut, so that the model may also be one whose operations cannot be seen: a subclassed
    `keras.Model`, which trains as one operation; `inputs` says what it is called with.

    Of a model that overrides `train_step` or another step, one of the same class and with the same
    layers is returned. It runs these steps on all ranks, with a share of each batch on each,
    gradients averaged and metrics brought together. Before the first update samples are tried:
    steps that replicas would train otherwise are refused, on all ranks.

    Args:
        model: The model; see `PipelineModel`.
        num_micro_batches: Number of micro-batches that each rank cuts its share into (gradient
            accumulation). Default: the one with which a step is fastest.
        inputs: For a subclassed or not yet built model what it is called with: a `keras.Input`, or
            several in the structure that its `call` takes. Files of a subclassed model are as if
            `keras.Model(inputs, model(inputs))` were saved, and the model itself holds the trained
            weights.
        **options: Of `PipelineModel`, as far as they are not about stages: memory and batch size to
            plan for, activation checkpointing, a `plan` of one stage, `shard_optimizer`,
            `gradient_dtype`.

    Raises:
        ConfigurationError: If an option cannot work.
        UnsupportedModelError: If replicas would train something else.
        PlanError: If `plan` belongs to another model, or none keeps the memory limit.

    Example::

        model = tnt.Model(keras_model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=256, epochs=10)

        model = tnt.Model(MySubclass(), inputs=keras.Input((784,)))
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Makes replicas of a model whose own steps are to be run as they are."""
        named = "layers" if issubclass(cls, Sequential) else "model"
        model = args[0] if args else options.get(named)
        if cls in (Model, Sequential) and has_own_steps(model):
            options.pop(named, None)
            return _with_own_steps(model, *args[1:], **options)
        return super().__new__(cls, *args, **options)

    def __init__(
        self,
        model: keras.Model,
        num_micro_batches: int | None = None,
        *,
        inputs: Any = None,
        **options: Any,
    ) -> None:
        if former := former_option(options):
            raise TypeError(f"{type(self).__name__} {former}")
        for name in OF_STAGES & {*options}:
            raise TypeError(f"{type(self).__name__} has no option '{name}': it is one stage.")
        super().__init__(
            model if inputs is None else _called_with(model, inputs),
            num_stages=1 if options.get("plan") is None else None,
            num_micro_batches=num_micro_batches,
            **options,
        )
        if self.plan.num_stages > 1:
            raise ConfigurationError(
                "A tnt.Model is one stage; use tnt.PipelineModel. Received: a plan of "
                f"{self.plan.num_stages} stages"
            )
        if inputs is not None and model.compiled and not self.compiled:
            self._compile_like(model)


def _called_with(model: Any, inputs: Any) -> keras.Model:
    """A model whose operations are known: the call of a subclassed one is one operation."""
    model_validation.check_model(model)
    if not hides_its_graph(model):
        raise ConfigurationError(
            f"Model '{model.name}' knows its inputs. Leave them out. Received: inputs={inputs!r}"
        )
    try:
        outputs = model(inputs)
    except Exception as error:  # whatever `call` may raise
        raise UnsupportedModelError(
            f"Model '{model.name}' cannot be called with inputs={inputs!r}, which have shapes and "
            f"no values: {type(error).__name__}: {error}"
        ) from error
    if not hides_its_graph(model):
        return model  # a Sequential, which is built now
    whole = keras.Model(inputs, outputs, name=model.name)
    treat_like(whole, model)
    return whole


class Sequential(Model):
    """A stack of layers that is trained on all ranks; see `Model`.

    Args:
        layers: The layers, a `keras.Input` first; or a built `keras.Sequential`.
        name: Name of the model.
        **options: See `Model`.

    Example::

        model = tnt.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
    """

    def __init__(self, layers: Any, name: str | None = None, **options: Any) -> None:
        if not isinstance(layers, keras.Model):
            layers = keras.Sequential(layers, name=name)
        super().__init__(layers, **options)


for _kind in (Model, Sequential):
    keras.saving.register_keras_serializable("tarantella_pp")(_kind)


def has_own_steps(model: Any) -> bool:
    """Whether a model computes its steps in a way of its own, in which replicas must run them."""
    if not isinstance(model, keras.Model) or isinstance(model, TrainingLoops):
        return False
    subclassed = hides_its_graph(model) and not isinstance(model, keras.Sequential)
    meters = subclassed and bool(own_metrics(model))
    return meters or bool(model_validation.own_steps_of(type(model)))


def _with_own_steps(
    model: Any,
    *,
    batch_size: int = 32,
    inputs: Any = None,
    gradient_dtype: str | None = None,
    **options: Any,
) -> Any:
    """Makes a model that runs the steps of another on all ranks, a share of each batch on each."""
    if given := {name: value for name, value in options.items() if value}:
        steps = ", ".join(model_validation.own_steps_of(type(model))) or "its metrics"
        raise ConfigurationError(
            f"Model '{model.name}' has {steps} of its own, which each rank runs as they are. Leave "
            f"options of plans out. Received: {given}"
        )
    checked_count("batch_size", batch_size)
    if inputs is not None:
        model(inputs)  # which builds it
    model_validation.check_backend()
    model_validation.check_strategy(model)
    ranks = world()
    if ranks.size == 1:
        return model
    # A class of its own, so that the user's class and model stay what they are.
    kind = class_before(type(model), OwnStepModel, _wrapped=model)
    model._engine = ReplicaSteps(model, ranks, gradient_dtype)
    model.train_function = model.test_function = model.predict_function = None
    replicas = object.__new__(kind)
    object.__setattr__(replicas, "__dict__", vars(model))  # one state: what one learns, both know
    return replicas


class OwnStepModel(TrainingLoops):
    """Comes before the class of a model whose own steps are run on all ranks."""

    _engine: ReplicaSteps
    _wrapped: keras.Model

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training as the user's class does; all ranks must call it."""
        model_validation.check_strategy(self)
        options = {name: keras.tree.map_structure(named, value) for name, value in kwargs.items()}
        given = keras.tree.map_structure(named, args)
        with self._engine.communicator.call("compile", arguments=given, **options):
            super().compile(*args, **kwargs)
            self._engine.forget_compilation()
        if self._engine.communicator.prints:
            model_validation.warn_of_compilation({"run_eagerly": self.run_eagerly})

    def _state_share(self) -> ReplicaState:
        return self._engine.weights

    def make_train_function(self, force: bool = False) -> None:
        """Builds this rank's training step; called by Keras' own loops."""
        if force:
            self._engine.forget_compilation()
        super().make_train_function(force)

    @collective("overwrite")
    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model as plain Keras does; all ranks must call it, the last one writes."""
        self._engine.check_alike()
        write_on_last_rank(functools.partial(self._wrapped.save, **kwargs), filepath, overwrite)

    @collective("overwrite")
    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """Saves the weights as plain Keras does; all ranks must call it, the last one writes."""
        model_validation.check_one_file(max_shard_size)
        self._engine.check_alike()
        write_on_last_rank(self._wrapped.save_weights, filepath, overwrite)

    @collective("skip_mismatch", contents=lambda given: contents_of(given["filepath"]))
    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Loads weights as plain Keras does; all ranks must call it, and each reads the file."""
        self._wrapped.load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)


def write_on_last_rank(write: Callable[[Path], None], filepath: Any, overwrite: bool) -> None:
    """Lets the last rank write a model that each rank has; replaces a file by a complete one."""
    path, ranks = model_validation.path_of(filepath), world()

    def work() -> None:
        # Keras would ask whoever started the job, who may be nobody.
        model_validation.check_overwrite(path, path.exists(), overwrite)
        if path.suffix in _FILES:
            replace_file(path, hdf5_errors()(write))
        else:
            write(path)

    on_one_rank(ranks, ranks.size - 1, f"save '{path}'", work)
