"""`Model` and `Sequential`: data parallelism alone, every rank trains the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.functional import hides_its_graph
from tarantella_pp.models import model_validation
from tarantella_pp.models.own_step_model import has_own_steps, with_replicas
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.options import Recompute, checked_count
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.communicator import world


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
        memory_limit: Largest memory of a rank; see `PipelineModel`.
        batch_size: Batch size to plan memory for, over all ranks. Default: 32.
        recompute: Activation checkpointing; see `PipelineModel`.
        plan: A `Plan` of one stage or the path of one, instead of the options before.
        shard_optimizer: Whether ranks share out the optimizer state; see `PipelineModel`.
        gradient_dtype: `"bfloat16"` to send gradients rounded; see `PipelineModel`.
        inputs: For a subclassed or not yet built model what it is called with: a `keras.Input`, or
            several in the structure that its `call` takes. Files of a subclassed model are as if
            `keras.Model(inputs, model(inputs))` were saved, and the model itself holds the trained
            weights.

    Raises:
        ConfigurationError: If an option cannot work.
        UnsupportedModelError: If replicas would train something else.
        PlanError: If `plan` belongs to another model, or no plan meets `memory_limit`.

    Example::

        model = tnt.Model(keras_model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=256, epochs=10)

        model = tnt.Model(MySubclass(), inputs=keras.Input((784,)))
    """

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """Makes replicas of a model whose own steps are to be run as they are."""
        if cls in (Model, Sequential) and has_own_steps(model):
            return _with_own_steps(model, *args, **options)
        return super().__new__(cls, model, *args, **options)

    def __init__(
        self,
        model: keras.Model,
        num_micro_batches: int | None = None,
        memory_limit: int | str | None = None,
        batch_size: int = 32,
        recompute: Recompute | None = None,
        plan: Plan | str | Path | None = None,
        shard_optimizer: bool = False,
        inputs: Any = None,
        gradient_dtype: str | None = None,
    ) -> None:
        super().__init__(
            model if inputs is None else _called_with(model, inputs),
            num_stages=1 if plan is None else None,
            num_micro_batches=num_micro_batches,
            memory_limit=memory_limit,
            batch_size=batch_size,
            recompute=recompute,
            plan=plan,
            shard_optimizer=shard_optimizer,
            gradient_dtype=gradient_dtype,
        )
        if self.plan.num_stages > 1:
            raise ConfigurationError(
                "A tnt.Model is one stage, and all ranks are its replicas. Received: a plan of "
                f"{self.plan.num_stages} stages. Use tnt.PipelineModel for it."
            )
        if inputs is not None and model.compiled and not self.compiled:
            self._compile_as(model)


def _called_with(model: Any, inputs: Any) -> keras.Model:
    """A model whose operations are known: the call of a subclassed one is one operation."""
    model_validation.check_model(model)
    if not hides_its_graph(model):
        raise ConfigurationError(
            f"Model '{model.name}' knows its inputs. Received: inputs={inputs!r}. Leave them out; "
            "they are for subclassed models and for Sequential ones that are not built."
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
    return keras.Model(inputs, outputs, name=model.name)


def _with_own_steps(
    model: Any,
    *,
    batch_size: int = 32,
    inputs: Any = None,
    gradient_dtype: str | None = None,
    **options: Any,
) -> Any:
    """Makes a model with steps of its own run them on all ranks; refuses options of plans."""
    if given := {name: value for name, value in options.items() if value}:
        steps = ", ".join(model_validation.own_steps_of(model)) or "its metrics"
        raise ConfigurationError(
            f"Model '{model.name}' has {steps} of its own: each rank runs its steps as they are, "
            f"and nothing is planned. Received: {given}. Leave that out."
        )
    checked_count("batch_size", batch_size)
    if inputs is not None:
        model(inputs)  # which builds it
    return with_replicas(model, world(), gradient_dtype)


class Sequential(Model):
    """A stack of layers that is trained on all ranks; see `Model`.

    Args:
        layers: The layers, of which the first is a `keras.Input`; or a built `keras.Sequential`.
        name: Name of the model.
        **options: See `Model`.

    Example::

        model = tnt.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
    """

    def __new__(cls, layers: Any = None, *args: Any, **options: Any) -> Any:
        """Makes replicas of a `keras.Sequential` with steps of its own, as `Model` does."""
        return super().__new__(cls, layers, *args, **options)

    def __init__(self, layers: Any, name: str | None = None, **options: Any) -> None:
        if not isinstance(layers, keras.Model):
            layers = keras.Sequential(layers, name=name)
        super().__init__(layers, **options)


for _kind in (Model, Sequential):
    keras.saving.register_keras_serializable("tarantella_pp")(_kind)
