"""Refuses, before anything is built, what a pipeline cannot do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import UNCUT, ConfigurationError, UnsupportedModelError, checked_count
from tarantella_pp.internals.functional import stateful_layers
from tarantella_pp.internals.training import batch_norms, strategy_of, warn_of_statistics
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.weights.remote_variables import is_stale

_OWN_STEPS = (
    *("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"),
    *("metrics", "get_metrics_result"),
)


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
    if overridden := own_steps_of(type(model)):
        raise UnsupportedModelError(
            f"Model '{model.name}' overrides {', '.join(overridden)}, which cannot be cut into "
            "stages. Move the code into layers, the loss or metrics, or train replicas of all of "
            "it with tnt.Model: docs/custom_loops.md."
        )


def own_steps_of(kind: type, base: type = keras.Model) -> list[str]:
    """Names what a class of models overrides of the steps of another one."""
    return [name for name in _OWN_STEPS if getattr(kind, name) is not getattr(base, name)]


def check_subclass(kind: type, base: type) -> None:
    """Refuses subclasses of the pipeline's own model whose code its steps would not run."""
    overridden = own_steps_of(kind, base) + ["call"] * (kind.call is not base.call)  # type: ignore[attr-defined]
    if overridden:
        raise UnsupportedModelError(
            f"Class {kind.__name__} overrides {', '.join(overridden)}, which the stages of a "
            "pipeline do not run. Move the code into layers, the loss or metrics."
        )


def check_strategy(model: Any) -> None:
    """Refuses a model in the scope of one of TensorFlow's distribution strategies."""
    if (strategy := strategy_of(model)) is not None:
        raise ConfigurationError(
            "A pipeline spreads a model over MPI ranks and does not work with tf.distribute. "
            f"Received: model '{model.name}' in the scope of {type(strategy).__name__}. Make and "
            "train it outside of any strategy's scope, and start one rank for each device."
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


def needs_whole_batch(extracted: ExtractedModel) -> str:
    """Why a model trains only in one micro-batch of one replica; empty if it does not."""
    for tensor in (extracted.graph.tensors[i] for i in extracted.graph.outputs):
        if tensor.rows_per_sample not in (None, 1):
            return (
                f"Output '{tensor.name}' of shape {tensor.shape} does not have one row for each "
                "sample, so outputs of micro-batches do not add up to that of the batch"
            )
    if names := [layer.name for layer in _batch_norms(extracted) if layer.synchronized]:
        return (
            f"BatchNormalization layers {', '.join(names)} have synchronized=True, but each "
            "micro-batch would get its own statistics"
        )
    if names := stateful_layers(extracted.model):
        return (
            f"Layers {', '.join(names)} are stateful: a state has one row for each sample of the "
            "batch, and a micro-batch has fewer"
        )
    return ""


def check_micro_batches(extracted: ExtractedModel, num_micro_batches: int) -> None:
    """Refuses to cut batches of a model that needs them whole."""
    reason = needs_whole_batch(extracted) if num_micro_batches > 1 else ""
    if reason:
        raise UnsupportedModelError(
            f"{reason}. {UNCUT}. Received: {num_micro_batches} micro-batches, of all replicas"
        )


def warn_of_batch_statistics(extracted: ExtractedModel, num_micro_batches: int) -> None:
    """Warns where the numbers differ from plain Keras, with layers frozen as they are now."""
    if num_micro_batches > 1:
        parts = f"{num_micro_batches} micro-batches, of all replicas,"
        warn_of_statistics(_batch_norms(extracted), parts)


def _batch_norms(extracted: ExtractedModel) -> list[Any]:
    """The BatchNormalization layers that take statistics of what they are given in training."""
    found = (layer for call in extracted.calls for layer in batch_norms(call.operation))
    return list(dict.fromkeys(layer for layer in found if layer.trainable))


def check_deferred(model: Any, balance: str | None) -> None:
    """Refuses to measure a model that has no weights yet."""
    if balance == "time" and any(map(is_stale, model.variables)):
        raise ConfigurationError(
            f"balance='time' runs model '{model.name}' on rank 0, which does not have all of its "
            "weights. Use balance='flops', or a plan made beforehand of a model with weights."
        )


def path_of(filepath: Any) -> Path:
    """The path of a file; nothing can replace one that is open."""
    if not isinstance(filepath, (str, os.PathLike)):
        raise ConfigurationError(
            f"Expected the path of a file. Received: filepath={filepath!r} of type "
            f"{type(filepath).__name__}"
        )
    return Path(filepath)


def check_overwrite(path: Path, exists: bool, overwrite: bool) -> None:
    """Refuses to replace a file that must not be replaced."""
    if exists and not overwrite:
        raise ConfigurationError(
            f"File '{path}' exists. Received: overwrite=False. Choose another name, or pass "
            "overwrite=True."
        )


def check_one_file(max_shard_size: float | None) -> None:
    """Refuses to write weights into several files."""
    if max_shard_size is not None:
        raise ConfigurationError(
            f"Weights are saved as one file. Received: max_shard_size={max_shard_size}. To have "
            "several, load that file in one process, and save it there."
        )


def check_optimizer(model: Any) -> None:
    """Refuses to train weights without an optimizer."""
    if model.optimizer is None and model.trainable_weights:
        raise ConfigurationError(
            f"Training model '{model.name}' needs an optimizer. Received: optimizer=None in "
            "`compile()`; so compiled it can evaluate and predict."
        )


def warn_of_compilation(given: Mapping[str, Any], stacklevel: int = 3) -> None:
    """Warns of options that ranks do not follow; Python that changes later is not run again."""
    for name in ("run_eagerly", "jit_compile"):
        if given.get(name) is True:
            warnings.warn(
                f"Ranks compile stages and steps themselves, without XLA, and ignore {name}=True: "
                "Python attributes, such as the optimizer's momentum, count as they are in the "
                "first step; the numbers are the same unless a callback changes them. To debug "
                "line by line, train the Keras model itself.",
                UserWarning,
                stacklevel=stacklevel,
            )
