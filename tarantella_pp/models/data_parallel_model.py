"""`Model` and `Sequential`: data parallelism alone, every rank trains the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.keras_internals.functional import network_of, own_metrics, runs_its_graph
from tarantella_pp.models import model_validation
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.plan.plan import Plan


@keras.saving.register_keras_serializable("tarantella_pp")
class Model(PipelineModel):
    """Trains a Keras model on all ranks, each of which computes its share of every batch.

    It is a `PipelineModel` of one stage, of which every rank has a replica. Gradients are added up
    over the ranks before the optimizer sees them, so that the numbers are those of the wrapped
    model in one process with the same batches, whatever the number of ranks. `batch_size` of `fit`
    is that of the whole batch, over all ranks.

    Nothing is cut, so that the model may also be one whose operations cannot be seen: a subclassed
    `keras.Model`, which trains as one operation. Say what it is called with, as `inputs`.

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
            several in the structure that its `call` takes. Files of a subclassed model are those of
            `keras.Model(inputs, model(inputs))`, and the model itself holds the trained weights.

    Raises:
        ConfigurationError: As of `PipelineModel`.
        UnsupportedModelError: If replicas would train something else.
        PlanError: As of `PipelineModel`.

    Example:
        ```python
        model = tnt.Model(keras_model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=256, epochs=10)

        model = tnt.Model(MySubclass(), inputs=keras.Input((784,)))
        ```
    """

    def __init__(
        self,
        model: keras.Model,
        num_micro_batches: int | None = None,
        memory_limit: int | str | None = None,
        batch_size: int = 32,
        recompute: str | Sequence[int] | None = None,
        plan: Plan | str | Path | None = None,
        shard_optimizer: bool = False,
        inputs: Any = None,
        gradient_dtype: str | None = None,
    ) -> None:
        super().__init__(
            model if inputs is None else _graph_of(model, inputs),
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


def _graph_of(model: Any, inputs: Any) -> keras.Model:
    """Returns a model whose operations are known: calls of a subclassed one are one operation."""
    model_validation.check_model(model)
    if network_of(model) is not None and runs_its_graph(model):
        raise ConfigurationError(
            f"Model '{model.name}' knows its inputs. Received: inputs={inputs!r}. Leave them out; "
            "they are for subclassed models and for Sequential ones that are not built."
        )
    if own := own_metrics(model):
        raise UnsupportedModelError(
            f"Model '{model.name}' has metrics of its own ({', '.join(m.name for m in own)}), "
            "which each replica would update with its own samples. Pass them to "
            "`compile(metrics=...)`."
        )
    try:
        outputs = model(inputs)
    except Exception as error:  # whatever `call` may raise
        raise UnsupportedModelError(
            f"Model '{model.name}' cannot be called with inputs={inputs!r}, which have shapes and "
            f"no values: {type(error).__name__}: {error}"
        ) from error
    if network_of(model) is not None and runs_its_graph(model):
        return model  # a Sequential, which is built now
    return keras.Model(inputs, outputs, name=model.name)


@keras.saving.register_keras_serializable("tarantella_pp")
class Sequential(Model):
    """A stack of layers that is trained on all ranks; see `Model`.

    Args:
        layers: The layers, or a built `keras.Sequential`. The first layer is an `Input`.
        name: Name of the model.
        **options: As of `Model`.

    Example:
        ```python
        model = tnt.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
        ```
    """

    def __init__(self, layers: Any, name: str | None = None, **options: Any) -> None:
        if not isinstance(layers, keras.Model):
            layers = keras.Sequential(layers, name=name)
        super().__init__(layers, **options)
