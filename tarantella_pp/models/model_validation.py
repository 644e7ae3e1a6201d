"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.keras_internals.training import layers_in, strategy_of
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.options import checked_count
from tarantella_pp.runtime.state.remote_variables import is_stale

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
    """Returns how many replicas so many ranks are; refuses numbers that do not fit each other."""
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
    """Refuses outputs that those of the micro-batches do not make up."""
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
    """Warns where the numbers are not those of plain Keras."""
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
    """Refuses batch statistics that are to be those of the whole batch."""
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
