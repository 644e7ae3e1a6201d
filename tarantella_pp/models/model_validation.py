"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.keras_internals.training import (
    is_keras_optimizer,
    layers_in,
    strategy_of,
)
from tarantella_pp.models.collective_model import CollectiveModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.probes.loss_probe import whole_batch_reason
from tarantella_pp.runtime.probes.optimizer_probe import treats_weights_apart

if TYPE_CHECKING:
    from tarantella_pp.runtime.engine import Engine

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
        UnsupportedModelError: If it is no Keras model, a pipeline already, needs loss scaling or
            overrides a step.
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
    if isinstance(model, CollectiveModel):
        raise UnsupportedModelError(
            f"Model '{model.name}' is a pipeline already. Wrap the model that it was made of."
        )
    own = [n for n in _OWN_STEPS if getattr(type(model), n) is not getattr(keras.Model, n)]
    if own:
        raise UnsupportedModelError(
            f"Model '{model.name}' overrides {', '.join(own)}, which a pipeline cannot split over "
            "stages. Move the code into layers, the loss or metrics."
        )


def check_subclass(kind: type, base: type) -> None:
    """Refuses subclasses of the pipeline's own model whose code its steps would not run.

    Args:
        kind: Class of the model that is made.
        base: The pipeline's own class.

    Raises:
        UnsupportedModelError: If it overrides a step or the call.
    """
    own = [n for n in (*_OWN_STEPS, "call") if getattr(kind, n) is not getattr(base, n)]
    if own:
        raise UnsupportedModelError(
            f"Class {kind.__name__} overrides {', '.join(own)}, which the stages of a pipeline "
            "do not run. Move the code into layers, the loss or metrics."
        )


def check_strategy(model: Any) -> None:
    """Refuses TensorFlow's own distribution, which would spread what the pipeline spreads already.

    Args:
        model: A Keras model, which remembers the scope it was made in.

    Raises:
        ConfigurationError: Names the strategy.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        raise ConfigurationError(
            "A pipeline spreads a model over MPI ranks and does not work with tf.distribute. "
            f"Received: model '{model.name}' in the scope of {type(strategy).__name__}. Make and "
            "train it outside of any strategy's scope, and start one rank for each device."
        )


def check_replicas(num_replicas: Any) -> None:
    """Refuses more than one pipeline side by side.

    Args:
        num_replicas: What the user passed, or a plan says.

    Raises:
        ConfigurationError: If there are several.
    """
    if num_replicas not in (None, 1):
        raise ConfigurationError(
            "This version trains one pipeline and no replicas of it yet. "
            f"Received: num_replicas={num_replicas!r}. Leave it out, and start as many ranks as "
            "there are stages; `make_plan(..., num_replicas=1)` and `tarantella plan make "
            "--stages` make plans of one pipeline."
        )


def check_optimizer(model: Any) -> None:
    """Refuses to train weights without an optimizer.

    Args:
        model: The compiled `PipelineModel`.

    Raises:
        ConfigurationError: If it has none.
    """
    if model.optimizer is None and model.trainable_weights:
        raise ConfigurationError(
            f"Training model '{model.name}' needs an optimizer. Received: optimizer=None in "
            "`compile()`; so compiled it can evaluate and predict."
        )


def check_step_by_hand(method: str, compiled: bool) -> None:
    """Refuses steps that cannot run where they are called.

    Args:
        method: The method that was called.
        compiled: Whether the model is compiled, if it has to be.

    Raises:
        ConfigurationError: Says what to do.
    """
    if not compiled:
        raise ConfigurationError(f"Call `compile()` before `{method}()`.")
    if tf.inside_function():
        raise ConfigurationError(
            f"`{method}()` of a pipeline exchanges messages, which a `tf.function` cannot. Call it "
            "outside of any; the stages are compiled all the same."
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


def check_outputs(graph: LayerGraph, num_micro_batches: int) -> None:
    """Refuses outputs that those of the micro-batches do not make up.

    Args:
        graph: The model's graph.
        num_micro_batches: Number of micro-batches.

    Raises:
        UnsupportedModelError: Names the output.
    """
    for tensor in (graph.tensors[i] for i in graph.outputs):
        if num_micro_batches > 1 and tensor.rows_per_sample not in (None, 1):
            raise UnsupportedModelError(
                f"Output '{tensor.name}' of shape {tensor.shape} does not have one row for each "
                "sample, so the outputs of micro-batches do not add up to that of the batch. "
                "Leave it out of the outputs, give it one row for each sample, or use "
                f"num_micro_batches=1. Received: num_micro_batches={num_micro_batches}"
            )


def warn_of_batch_statistics(calls: Iterable[Any], num_micro_batches: int) -> None:
    """Warns where the numbers are not those of plain Keras.

    Args:
        calls: The calls of the model's graph.
        num_micro_batches: Number of micro-batches.
    """
    names = [layer.name for layer in _batch_norms(calls)]
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
        given: The arguments of `keras.Model.compile`, defaults included; the optimizer an object,
            or a name, which cannot say any of what is refused.
        policy: Name of the model's dtype policy.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: Names the option and what to do.
    """
    optimizer = given["optimizer"]
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
        check_own_optimizer(optimizer, num_ranks)


def check_own_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuses optimizers of the user's that look at all gradients at once.

    Args:
        optimizer: An optimizer, or `None`.
        num_ranks: Number of MPI ranks.

    Raises:
        ConfigurationError: If it does, or cannot be tried.
    """
    if optimizer is None or is_keras_optimizer(optimizer):
        return
    name = type(optimizer).__name__
    try:
        apart = treats_weights_apart(optimizer)
    except Exception as error:  # whatever a class of the user's may raise
        raise ConfigurationError(
            f"Optimizer {name} cannot be tried out with other weights "
            f"({type(error).__name__}: {error}), so it is not known whether it may train the "
            f"weights of {num_ranks} ranks apart from each other. Make `get_config` return what "
            "its __init__ takes, as Keras' own optimizers do, or run all stages in one process."
        ) from error
    if not apart:
        raise ConfigurationError(
            f"Optimizer {name} looks at several weights at once, which are on {num_ranks} ranks. "
            "Treat each weight by itself, or run all stages in one process."
        )


def warn_of_compilation(given: Mapping[str, Any]) -> None:
    """Warns of options that a pipeline does not follow, and whose numbers are the same.

    Args:
        given: The arguments of `keras.Model.compile`, defaults included.
    """
    ignored = [f"{name}=True" for name in ("run_eagerly", "jit_compile") if given[name] is True]
    if ignored:
        warnings.warn(
            f"A pipeline compiles each stage by itself, without XLA, and ignores {ignored[0]}: the "
            "numbers are the same. To debug layers line by line, train the Keras model itself.",
            UserWarning,
            stacklevel=3,
        )


def check_loss(compiled: Any, engine: Engine) -> None:
    """Refuses a loss of the whole batch where it is asked for before all outputs are there.

    Warns of what it costs where the schedule may be chosen for it.

    Args:
        compiled: The `CompileLoss` that the model is to be compiled with; `None` for none.
        engine: What runs the model.

    Raises:
        ConfigurationError: If the user's schedule is one micro-batch after the other.
    """
    plan, graph = engine.plan, engine.extracted.graph
    reason = whole_batch_reason(compiled, engine.extracted)
    if reason is None or plan.num_micro_batches == 1:
        return
    if engine.sees_batch_at_once:
        return
    if not engine.free_schedule:
        raise ConfigurationError(
            f"Received: schedule={plan.schedule!r}, which computes the loss of one micro-batch "
            f"after the other, but {reason}. Leave `schedule` out, use schedule='gpipe' or "
            "num_micro_batches=1, or a loss of keras.losses that treats each sample by itself."
        )
    if engine.prints:
        outputs = sum(graph.tensors[tensor].bytes_per_sample for tensor in graph.outputs)
        warnings.warn(
            f"{reason[0].upper()}{reason[1:]}, so it is computed of the whole batch at once. "
            "Training runs schedule='gpipe': each stage keeps what its backward pass needs of all "
            f"num_micro_batches={plan.num_micro_batches} micro-batches, and the last one all "
            f"outputs, {format_bytes(outputs)} for each sample; `model.plan` counts both. A loss "
            "of keras.losses that treats each sample by itself needs neither.",
            UserWarning,
            stacklevel=3,
        )


def check_synchronized(calls: Iterable[Any], num_micro_batches: int) -> None:
    """Refuses batch statistics that are to be those of the whole batch.

    Args:
        calls: The calls of the model's graph.
        num_micro_batches: Number of micro-batches.

    Raises:
        UnsupportedModelError: Names the layers.
    """
    names = [layer.name for layer in _batch_norms(calls) if layer.synchronized]
    if names and num_micro_batches > 1:
        raise UnsupportedModelError(
            f"BatchNormalization layers {', '.join(names)} have synchronized=True, but each of "
            f"the num_micro_batches={num_micro_batches} micro-batches would get its own "
            "statistics. Use num_micro_batches=1, or synchronized=False for statistics of "
            "micro-batches."
        )


def _batch_norms(calls: Iterable[Any]) -> list[Any]:
    """The BatchNormalization layers that take statistics of what they are given in training."""
    found = (
        layer
        for call in calls
        if isinstance(call.operation, keras.layers.Layer)
        for layer in layers_in(call.operation)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    )
    return list(dict.fromkeys(found))
