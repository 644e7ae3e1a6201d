"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.partition.plan import Plan
from tarantella_pp.runtime.keras_training import layers_in

_PLAN_DEFAULTS = {"balance": "memory", "batch_size": 32}
_OWN_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def check_backend() -> None:
    """Refuses another Keras backend than TensorFlow.

    Raises:
        ConfigurationError: If Keras runs on another backend.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigurationError(
            f"Pipelines need Keras on TensorFlow. Received: KERAS_BACKEND={backend!r}. Set the "
            "environment variable KERAS_BACKEND=tensorflow, or `backend` in ~/.keras/keras.json."
        )


def check_model(model: Any) -> None:
    """Refuses models whose own training code the pipeline would ignore, or that cannot train.

    Args:
        model: What the user passed.

    Raises:
        UnsupportedModelError: If it is no Keras model, needs loss scaling or overrides a step.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"Expected a Keras model. Received: model={model!r} of type {type(model).__name__}"
        )
    if model.dtype_policy.name == "mixed_float16":
        raise UnsupportedModelError(
            f"Model '{model.name}' has the dtype policy 'mixed_float16', whose loss scaling a "
            "pipeline does not support. Use 'mixed_bfloat16', which needs none."
        )
    own = [n for n in _OWN_STEPS if getattr(type(model), n) is not getattr(keras.Model, n)]
    if own:
        raise UnsupportedModelError(
            f"Model '{model.name}' overrides {', '.join(own)}, which a pipeline cannot split over "
            "stages. Move the code into layers, the loss or metrics."
        )


def check_trainable(model: Any) -> None:
    """Refuses models that have nothing to train.

    Args:
        model: A Keras model.

    Raises:
        UnsupportedModelError: If it has no trainable weights.
    """
    if not model.trainable_weights:
        raise UnsupportedModelError(
            f"Model '{model.name}' has no trainable weights: there is nothing to train. Set "
            "`trainable = True` on some of its layers before you make the pipeline."
        )


def check_wire_dtype(wire_dtype: Any) -> None:
    """Refuses types that numbers do not travel in.

    Args:
        wire_dtype: What the user passed.

    Raises:
        ConfigurationError: If it is none of them.
    """
    if wire_dtype not in (None, "bfloat16"):
        raise ConfigurationError(
            f"Expected 'bfloat16', or None for the numbers' own type. "
            f"Received: wire_dtype={wire_dtype!r}"
        )


def check_ranks(num_stages: int, num_ranks: int) -> None:
    """Refuses numbers of ranks that do not fit the number of stages.

    Args:
        num_stages: Number of stages.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: If they do not fit; says which numbers would.
    """
    if isinstance(num_stages, bool) or not hasattr(num_stages, "__index__") or num_stages < 1:
        raise ConfigurationError(
            f"Expected a whole number from 1 on. Received: num_stages={num_stages!r}"
        )
    if num_stages % num_ranks == 0:
        return
    if num_ranks % num_stages == 0:
        raise ConfigurationError(
            f"{num_ranks} ranks for {num_stages} stages would be {num_ranks // num_stages} "
            "replicas of the pipeline, which this version does not train. Start "
            f"{num_stages} ranks (`tarantella -n {num_stages} -- ...`), or use "
            f"num_stages={num_ranks}."
        )
    fitting = [n for n in range(1, num_stages + 1) if num_stages % n == 0]
    raise ConfigurationError(
        f"The stages do not spread evenly over the ranks. Received: num_stages={num_stages} on "
        f"{num_ranks} ranks. Start one of {fitting} ranks, or use num_stages={num_ranks}."
    )


def check_plan(plan: Any, options: Mapping[str, Any]) -> None:
    """Refuses what is no plan, and options that the plan has decided already.

    Args:
        plan: What the user passed.
        options: The other options that the user passed, by name.

    Raises:
        ConfigurationError: Names the option.
    """
    if not isinstance(plan, (Plan, str, Path)):
        raise ConfigurationError(
            f"Expected a Plan or the path of one. Received: plan={plan!r} of type "
            f"{type(plan).__name__}"
        )
    for name, value in options.items():
        if value is not None and value != _PLAN_DEFAULTS.get(name):
            raise ConfigurationError(
                f"The plan says how the pipeline is made. Received: plan together with "
                f"{name}={value!r}. Leave one of the two out."
            )


def warn_of_batch_statistics(calls: Iterable[Any], num_micro_batches: int) -> None:
    """Warns where the numbers are not those of plain Keras.

    Args:
        calls: The calls of the model's graph.
        num_micro_batches: Number of micro-batches.
    """
    names = {
        layer.name: None
        for call in calls
        if isinstance(call.operation, keras.layers.Layer)
        for layer in layers_in(call.operation)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    }
    if names and num_micro_batches > 1:
        warnings.warn(
            f"BatchNormalization layers {', '.join(names)} take their statistics of each of the "
            f"num_micro_batches={num_micro_batches} micro-batches instead of the batch, and update "
            "their moving averages as often, so the numbers differ from those of one process. "
            "LayerNormalization and GroupNormalization do not depend on the batch.",
            UserWarning,
            stacklevel=3,
        )


def check_compilation(given: Mapping[str, Any], policy: str, num_ranks: int) -> None:
    """Refuses what of `compile()` would silently be ignored or be wrong on several ranks.

    Args:
        given: The arguments of `keras.Model.compile`, defaults included.
        policy: Name of the model's dtype policy.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: Names the option and what to do.
    """
    for name in ("run_eagerly", "jit_compile"):
        if given[name] is True:
            raise ConfigurationError(
                f"A pipeline compiles each stage by itself. Received: {name}=True. Leave it out; "
                "to debug layers, train the Keras model itself."
            )
    optimizer = keras.optimizers.get(given["optimizer"])
    scales = given["auto_scale_loss"] and policy == "mixed_float16"
    if scales or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "Loss scaling (LossScaleOptimizer, used with mixed_float16) is not supported in a "
            "pipeline. Use the dtype policy 'mixed_bfloat16', which needs none."
        )
    if num_ranks > 1:
        for option in ("global_clipnorm", "use_ema"):
            if getattr(optimizer, option, None):
                raise ConfigurationError(
                    f"Optimizer option {option} needs the weights of all stages at once, which are "
                    f"on {num_ranks} ranks. Received: {option}={getattr(optimizer, option)}. Leave "
                    "it out (`clipnorm` and `clipvalue` work), or run all stages in one process."
                )
