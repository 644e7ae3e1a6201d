"""`Model` and `Sequential`: data parallelism alone, every rank trains the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.plan.plan import Plan


@keras.saving.register_keras_serializable("tarantella_pp")
class Model(PipelineModel):
    """Trains a Keras model on all ranks, each of which computes its share of every batch.

    It is a `PipelineModel` of one stage, of which every rank has a replica. Gradients are added up
    over the ranks before the optimizer sees them, so that the numbers are those of the wrapped
    model in one process with the same batches, whatever the number of ranks. `batch_size` of `fit`
    is that of the whole batch, over all ranks.

    Args:
        model: The Functional or built Sequential model; see `PipelineModel`.
        num_micro_batches: Number of micro-batches that each rank cuts its share into (gradient
            accumulation). Default: the one with which a step is fastest.
        memory_limit: Largest memory of a rank; see `PipelineModel`.
        batch_size: Batch size to plan memory for, over all ranks. Default: 32.
        recompute: Activation checkpointing; see `PipelineModel`.
        plan: A `Plan` of one stage or the path of one, instead of the options before.
        shard_optimizer: Whether ranks share out the optimizer state; see `PipelineModel`.

    Raises:
        ConfigurationError: As of `PipelineModel`.
        UnsupportedModelError: If replicas would train something else.
        PlanError: As of `PipelineModel`.

    Example:
        ```python
        model = tnt.Model(keras_model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=256, epochs=10)
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
    ) -> None:
        super().__init__(
            model,
            num_stages=1 if plan is None else None,
            num_micro_batches=num_micro_batches,
            memory_limit=memory_limit,
            batch_size=batch_size,
            recompute=recompute,
            plan=plan,
            shard_optimizer=shard_optimizer,
        )
        if self.plan.num_stages > 1:
            raise ConfigurationError(
                "A tnt.Model is one stage, and all ranks are its replicas. Received: a plan of "
                f"{self.plan.num_stages} stages. Use tnt.PipelineModel for it."
            )


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
