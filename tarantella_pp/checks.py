"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError

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
        TypeError: If it is no Keras model.
        UnsupportedModelError: If it overrides a step, or has nothing to train.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
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


def check_ranks(num_stages: int, num_ranks: int) -> None:
    """Refuses numbers of ranks that do not fit the number of stages.

    Args:
        num_stages: Number of stages.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: If they do not fit; says which numbers would.
    """
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


def check_compilation(optimizer: Any, options: dict[str, Any], num_ranks: int) -> None:
    """Refuses what of `compile()` would silently be ignored or be wrong on several ranks.

    Args:
        optimizer: The compiled optimizer.
        options: The values of `run_eagerly` and `jit_compile` that the user passed.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: Names the option and what to do.
    """
    for name in ("run_eagerly", "jit_compile"):
        if options.get(name) is True:
            raise ConfigurationError(
                f"A pipeline compiles each stage by itself. Received: {name}=True. Leave it out; "
                "to debug layers, train the Keras model itself."
            )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
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
