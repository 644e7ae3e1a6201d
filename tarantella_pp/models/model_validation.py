"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError, checked_count
from tarantella_pp.internals.optimizers import delegates_of, is_keras_optimizer, wrapped_in
from tarantella_pp.internals.training import layers_in, strategy_of
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.runtime.engine import Engine
from tarantella_pp.runtime.probes.loss_probe import whole_batch_reason
from tarantella_pp.runtime.probes.optimizer_probe import treats_weights_apart
from tarantella_pp.runtime.weights.remote_variables import is_stale

_OWN_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
_NAMED = 3
"""Layers that a warning names; models have hundreds of one kind."""


def check_backend() -> None:
    """Refuses another Keras backend than TensorFlow."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigurationError(
            f"Pipelines need Keras on TensorFlow. Received: KERAS_BACKEND={backend!r}. Set the "
            "environment variable KERAS_BACKEND=tensorflow, or `backend` in ~/.keras/keras.json."
        )


def check_model(model: Any) -> None:
    """Refuses models whose own training code the pipeline would ignore, or that cannot train."""
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"Expected a Keras model. Received: model={model!r} of type {type(model).__name__}"
        )
    if isinstance(model, TrainingLoops):
        raise UnsupportedModelError(
            f"Model '{model.name}' is a pipeline already. Wrap the model that it was made of."
        )
    overridden = own_steps_of(model)
    if overridden:
        raise UnsupportedModelError(
            f"Model '{model.name}' overrides {', '.join(overridden)}, which cannot be cut into "
            "stages. Move the code into layers, the loss or metrics, or train replicas of all of "
            "it with tnt.Model: docs/custom_loops.md."
        )


def own_steps_of(model: Any) -> list[str]:
    """Names what a model overrides of Keras' steps."""
    return [n for n in _OWN_STEPS if getattr(type(model), n) is not getattr(keras.Model, n)]


def check_subclass(kind: type, base: type) -> None:
    """Refuses subclasses of the pipeline's own model whose code its steps would not run."""
    overridden = [n for n in (*_OWN_STEPS, "call") if getattr(kind, n) is not getattr(base, n)]
    if overridden:
        raise UnsupportedModelError(
            f"Class {kind.__name__} overrides {', '.join(overridden)}, which the stages of a "
            "pipeline do not run. Move the code into layers, the loss or metrics."
        )


def check_strategy(model: Any) -> None:
    """Refuses a model in the scope of one of TensorFlow's distribution strategies."""
    strategy = strategy_of(model)
    if strategy is not None:
        raise ConfigurationError(
            "A pipeline spreads a model over MPI ranks and does not work with tf.distribute. "
            f"Received: model '{model.name}' in the scope of {type(strategy).__name__}. Make and "
            "train it outside of any strategy's scope, and start one rank for each device."
        )


def check_step_by_hand(method: str, compiled: bool) -> None:
    """Refuses steps that cannot run where they are called."""
    if not compiled:
        raise ConfigurationError(f"Call `compile()` before `{method}()`.")
    if tf.inside_function():
        raise ConfigurationError(
            f"`{method}()` of a pipeline exchanges messages, which a `tf.function` cannot. Call it "
            "outside of any; the stages are compiled all the same."
        )


def replicas_of(num_stages: Any, num_ranks: int, num_replicas: int | None = None) -> int:
    """Returns how many replicas the ranks are; refuses numbers that do not fit each other."""
    num_stages = checked_count("num_stages", num_stages)
    if num_replicas is not None:
        replicas = checked_count("num_replicas", num_replicas)
    else:
        replicas = num_ranks // num_stages if num_ranks % num_stages == 0 else 1
    if num_ranks == 1:  # which runs the micro-batches of all replicas
        return replicas
    if num_ranks % replicas == 0 and num_stages % (num_ranks // replicas) == 0:
        return replicas
    given = "" if num_replicas is None else f" and num_replicas={num_replicas}"
    raise ConfigurationError(
        "Ranks are stages x replicas, or fewer where a rank has several stages. "
        f"Received: num_stages={num_stages}{given} on {num_ranks} ranks. Start "
        f"{num_stages * replicas} ranks (`tarantella -n {num_stages * replicas} -- ...`), or use "
        f"num_stages={max(1, num_ranks // replicas)}."
    )


def needs_one_replica(extracted: ExtractedModel) -> bool:
    """Whether a model is refused on several replicas, whatever the number of micro-batches."""
    graph = extracted.graph
    outputs = [graph.tensors[i].rows_per_sample for i in graph.outputs]
    return any(rows not in (None, 1) for rows in outputs) or any(
        layer.synchronized for layer in _batch_norms(extracted.calls)
    )


def check_outputs(graph: LayerGraph, num_micro_batches: int) -> None:
    """Refuses outputs that cannot be put together from micro-batches."""
    for tensor in (graph.tensors[i] for i in graph.outputs):
        if num_micro_batches > 1 and tensor.rows_per_sample not in (None, 1):
            raise UnsupportedModelError(
                f"Output '{tensor.name}' of shape {tensor.shape} does not have one row for each "
                "sample, so the outputs of micro-batches do not add up to that of the batch. "
                "Leave it out of the outputs, give it one row for each sample, or use "
                f"num_micro_batches=1 and num_replicas=1. Received: {num_micro_batches} "
                "micro-batches, of all replicas"
            )


def warn_of_batch_statistics(calls: Iterable[Any], num_micro_batches: int) -> None:
    """Warns where the numbers differ from plain Keras."""
    names = [layer.name for layer in _batch_norms(calls)]
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"and {len(names) - _NAMED} more"]
    if names and num_micro_batches > 1:
        warnings.warn(
            f"BatchNormalization layers {', '.join(names)} take their statistics of each of the "
            f"num_micro_batches={num_micro_batches} micro-batches instead of the batch, so the "
            "numbers differ from those of one process; only their moving averages see the batch. "
            "LayerNormalization and GroupNormalization do not depend on the batch.",
            UserWarning,
            stacklevel=3,
        )


def check_synchronized(calls: Iterable[Any], num_micro_batches: int) -> None:
    """Refuses batch statistics that must be taken over the whole batch."""
    names = [layer.name for layer in _batch_norms(calls) if layer.synchronized]
    if names and num_micro_batches > 1:
        raise UnsupportedModelError(
            f"BatchNormalization layers {', '.join(names)} have synchronized=True, but each of "
            f"the num_micro_batches={num_micro_batches} micro-batches would get its own "
            "statistics. Use num_micro_batches=1 and num_replicas=1, or synchronized=False for "
            "statistics of micro-batches."
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


def check_deferred(model: Any, balance: str | None) -> None:
    """Refuses to measure a model that has no weights yet."""
    if balance == "time" and any(map(is_stale, model.variables)):
        raise ConfigurationError(
            f"balance='time' runs model '{model.name}' on rank 0, which does not have all of its "
            "weights. Use balance='flops', or a plan made beforehand of a model with weights."
        )


def check_division(optimizer: Any, weights: Sequence[Any], num_ranks: int) -> None:
    """Refuses optimizers that would do something else on several ranks than on one."""
    if optimizer is None or num_ranks == 1:
        return
    delegates = delegates_of(wrapped_in(optimizer), weights)
    for part in dict.fromkeys([optimizer, wrapped_in(optimizer), *delegates]):
        _check_own_optimizer(part, num_ranks)
        if part in delegates and part.global_clipnorm:
            raise ConfigurationError(
                f"Optimizer {part.name} in {wrapped_in(optimizer).name} clips the gradients of "
                f"some weights by their common norm, and they are on {num_ranks} ranks. Received: "
                f"global_clipnorm={part.global_clipnorm} of an optimizer in a MultiOptimizer. Use "
                "clipnorm, which clips each by itself, or run all stages in one process."
            )


def _check_own_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuses optimizers of the user's that look at all gradients at once."""
    if is_keras_optimizer(optimizer):
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


def check_loss(compiled: Any, engine: Engine) -> None:
    """Refuses a loss of the whole batch where it is asked for before all outputs are there.

    Warns of what it costs where the schedule may be chosen for it.
    """
    plan, graph = engine.plan, engine.extracted.graph
    reason = whole_batch_reason(compiled, engine.extracted)
    if reason is None or plan.num_micro_batches == 1:
        return
    if engine.schedules.sees_batch_at_once:
        return
    if not engine.schedules.free:
        raise ConfigurationError(
            f"Received: schedule={plan.schedule!r}, which computes the loss of one micro-batch "
            f"after the other, but {reason}. Leave `schedule` out, use schedule='gpipe' or "
            "num_micro_batches=1, or a loss that treats each sample by itself."
        )
    if engine.prints:
        outputs = sum(graph.tensors[tensor].bytes_per_sample for tensor in graph.outputs)
        warnings.warn(
            f"{reason[0].upper()}{reason[1:]}, so it is computed of the whole batch at once. "
            "Training runs schedule='gpipe': each stage keeps what its backward pass needs of all "
            f"num_micro_batches={plan.num_micro_batches} micro-batches, and the last one all "
            f"outputs, {format_bytes(outputs)} for each sample; `model.plan` counts both. A loss "
            "that treats each sample by itself needs neither.",
            UserWarning,
            stacklevel=3,
        )


def check_overwrite(path: Path, exists: bool, overwrite: bool) -> None:
    """Refuses to replace a file that must not be replaced."""
    if exists and not overwrite:
        raise ConfigurationError(
            f"File '{path}' exists. Received: overwrite=False. Choose another name, or pass "
            "overwrite=True."
        )


def check_optimizer(model: Any) -> None:
    """Refuses to train weights without an optimizer."""
    if model.optimizer is None and model.trainable_weights:
        raise ConfigurationError(
            f"Training model '{model.name}' needs an optimizer. Received: optimizer=None in "
            "`compile()`; so compiled it can evaluate and predict."
        )


def warn_of_compilation(given: Mapping[str, Any]) -> None:
    """Warns of options that a pipeline does not follow, and whose numbers are the same."""
    ignored = [f"{name}=True" for name in ("run_eagerly", "jit_compile") if given[name] is True]
    if ignored:
        warnings.warn(
            f"A pipeline compiles each stage by itself, without XLA, and ignores {ignored[0]}: the "
            "numbers are the same. To debug layers line by line, train the Keras model itself.",
            UserWarning,
            stacklevel=3,
        )
