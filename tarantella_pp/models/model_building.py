"""Distributed models made of a file, a description or another model: each rank builds its share."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.functional import hides_its_graph
from tarantella_pp.internals.model_files import deserialized
from tarantella_pp.models.data_parallel_model import (
    OF_STAGES,
    Model,
    has_own_steps,
    write_on_last_rank,
)
from tarantella_pp.models.deferred_init import deferred_init
from tarantella_pp.models.keras_file import KerasFile
from tarantella_pp.models.model_validation import path_of
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.comm.collective import contents_of, on_all_ranks
from tarantella_pp.runtime.comm.communicator import world

logger = logging.getLogger(__name__)
_COMPILATION = "compile_config"


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Loads a model that Keras or one of its distributed models has saved, distributed.

    All ranks must call it, and each reads the weights and the optimizer state of its own stages
    only, one variable at a time. So a model may be larger than the memory of any rank. The file may
    have been saved with any number of stages and replicas, or by plain Keras. What cannot be built
    by share (`tnt.deferred_init`), and legacy `.h5` files, every rank loads as a whole before it
    keeps its share, and the log says so.

    Args:
        filepath: Path of a `.keras` file, or of what else `keras.models.load_model` takes. Ranks
            may have files of their own, with equal contents.
        custom_objects: Classes and functions by their names, as in Keras.
        compile: Whether to compile the model as it was, with the state of its optimizer.
        safe_mode: Whether to refuse lambdas, as in Keras.
        **options: Of `tnt.PipelineModel`, such as `num_stages`; or of `tnt.Model` for a model that
            cannot be cut, such as `inputs`, which a subclassed one needs. Default: stages and
            replicas with which a step is fastest.

    Returns:
        A `tnt.PipelineModel`; for a subclassed model, or one with steps of its own, a `tnt.Model`.

    Raises:
        ConfigurationError: On all ranks, if the file is missing or damaged on one of them, differs
            between them, or does not fit, or an option cannot work.

    Example::

        model = tnt.models.load_model("model.keras", num_stages=4)
        model.fit(x, y)
    """
    objects, method = dict(custom_objects or {}), "load_model"

    def whole() -> Any:
        return keras.models.load_model(filepath, objects, compile=compile, safe_mode=safe_mode)

    with contextlib.ExitStack() as stack:
        file = _agreed_file(filepath, stack, compile=bool(compile), safe_mode=bool(safe_mode))
        if file is None:
            reason = "only Keras reads files of this kind"
            return _wrapped(_built(whole, method, options, reason=reason)[0], options)
        config = dict(file.config)
        compilation = config.pop(_COMPILATION, None)
        model, by_share = _built(
            lambda: deserialized(config, objects, safe_mode), method, options, whole
        )
        distributed = _wrapped(model, options)
        if by_share:
            if compile:  # also what its constructor has compiled by default
                _compile_as(distributed, compilation, objects, safe_mode, again=True)
            with world().call("load_model (weights)"):
                distributed._read_state(file)
    return distributed


def save_model(
    model: Any, filepath: str | os.PathLike[str], overwrite: bool = True, **options: Any
) -> None:
    """Saves a model as `save` of a distributed model does; all ranks must call it.

    Of a model of plain Keras, which each rank has for itself, the last rank's is saved.

    Args:
        model: A distributed model, or one of plain Keras.
        filepath: Path of the file.
        overwrite: Whether to replace an existing file.
        **options: What the model's `save` takes.

    Raises:
        ConfigurationError: On all ranks, if the model cannot be saved so.
        FileError: If the file cannot be written; an older one is unchanged.

    Example::

        tnt.models.save_model(model, "model.keras")
    """
    if isinstance(model, TrainingLoops):
        model.save(filepath, overwrite=overwrite, **options)
        return
    with world().call("save_model", overwrite=overwrite):
        write_on_last_rank(
            lambda path: keras.saving.save_model(model, path, **options), filepath, overwrite
        )


def model_from_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Makes a distributed model of a configuration, with new weights; all ranks must call it.

    No rank has more than the weights of its own stages, whose bits are those that they would have
    in one process. Where a model cannot be built so, every rank builds all of it, and the log says
    why.

    Args:
        config: What `get_config()` of a Functional or Sequential model returns, or
            `keras.saving.serialize_keras_object` of any model; with this one the new model is
            compiled, too, if that one was.
        custom_objects: Classes and functions by their names, as in Keras.
        **options: Of `tnt.PipelineModel`, or of `tnt.Model` for a model that cannot be cut.

    Returns:
        A `tnt.PipelineModel`; for a subclassed model, or one with steps of its own, a `tnt.Model`.

    Raises:
        ConfigurationError: On all ranks, if no model can be made of it, or an option cannot work.

    Example::

        model = tnt.models.model_from_config(keras_model.get_config(), num_stages=4)
    """
    config = dict(config)
    compilation = config.pop(_COMPILATION, None)

    def make() -> Any:
        if "class_name" not in config:
            return PipelineModel.from_config(config, custom_objects)
        return deserialized(config, custom_objects)

    distributed = _wrapped(_built(make, "model_from_config", options)[0], options)
    _compile_as(distributed, compilation, custom_objects)
    return distributed


def model_from_json(
    json_string: str, custom_objects: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Makes a distributed model of what `to_json()` returns; see `model_from_config`.

    Args:
        json_string: The description.
        custom_objects: Classes and functions by their names, as in Keras.
        **options: See `model_from_config`.
    """
    try:
        config = json.loads(json_string)
    except ValueError as error:
        raise ConfigurationError(
            "Expected what `to_json()` of a model returns. Received: no JSON, "
            f"{json_string!r:.60}: {error}"
        ) from error
    return model_from_config(config, custom_objects, **options)


def clone_model(
    model: Any,
    input_tensors: Any = None,
    clone_function: Callable[[Any], Any] | None = None,
    call_function: Callable[..., Any] | None = None,
    recursive: bool = False,
    **options: Any,
) -> Any:
    """Makes a distributed model with the layers of another one and new weights.

    All ranks must call it. Weights are made as in `model_from_config`. The new model is compiled
    if the other one is.

    Args:
        model: A distributed model, or a Functional or Sequential one of plain Keras.
        input_tensors: As in Keras.
        clone_function: As in Keras.
        call_function: As in Keras.
        recursive: As in Keras.
        **options: See `model_from_config`. Default: the plan of a distributed model, unless
            other arguments change its layers.

    Returns:
        A model of the kind of the other one if that is distributed; otherwise as
        `model_from_config`.

    Raises:
        ConfigurationError: On all ranks, if the model cannot be cloned, or an option cannot work.
        UnsupportedModelError: If it is no model, or cannot be trained so.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"clone_model takes a model. Received: model={model!r} of type {type(model).__name__}"
        )
    names = ("input_tensors", "clone_function", "call_function", "recursive")
    values = (input_tensors, clone_function, call_function, recursive or None)
    given = {n: value for n, value in zip(names, values, strict=True) if value is not None}
    if isinstance(model, PipelineModel) and not given and not options:
        options = {"plan": model.plan}
    plain = model._wrapped if isinstance(model, TrainingLoops) else model
    compilation = model.get_compile_config() if model.compiled else None

    whole = functools.partial(keras.models.clone_model, plain, **given)

    def copy_layers() -> Any:
        before, plain.compiled = plain.compiled, False  # Keras would compile the copy, too
        try:
            return whole()
        finally:
            plain.compiled = before

    every = copy_layers if isinstance(model, PipelineModel) else whole
    made = _built(copy_layers, "clone_model", options, every)[0]
    kind = Model if isinstance(model, Model) and "num_stages" not in options else None
    clone = _wrapped(made, options, kind)
    _compile_as(clone, compilation)
    return clone


def _built(
    make: Callable[[], Any],
    method: str,
    options: Mapping[str, Any],
    whole: Callable[[], Any] | None = None,
    reason: str = "",
) -> tuple[Any, bool]:
    """Builds a model without weights or, if that cannot be done, all of it on every rank."""
    ranks, model, drawn = world(), None, random.getstate()
    if options.get("balance") == "time":
        reason = reason or "balance='time' runs the model on rank 0"
    if not reason:
        scope = deferred_init()
        scope.__enter__()  # where ranks meet: what they do not agree on is no reason, but an error
        try:
            with contextlib.ExitStack() as stack:
                stack.push(scope)
                model = make()
            reason = _reason_of(model)
        except Exception as error:  # what cannot be done so, or not at all: it is found out next
            reason = f"{type(error).__name__}: {error}"

    def build() -> Any:
        try:
            return (whole or make)()
        except Exception as error:
            raise ConfigurationError(
                f"{method} cannot build the model: {type(error).__name__}: {error}"
            ) from error

    with ranks.call(f"{method} (build)"):
        reasons = list(filter(None, ranks.allgather_json(reason)))
        if not reasons:
            return model, True
        random.setstate(drawn)  # so that weights have the seeds of a model built at once
        model = on_all_ranks(ranks, "build the model", build)
    if ranks.size > 1 and ranks.prints:
        logger.warning(
            "%s builds all of the model on every rank, not each its share: %s", method, reasons[0]
        )
    return model, False


def _wrapped(model: Any, options: Mapping[str, Any], kind: Any = None) -> Any:
    subclassed = hides_its_graph(model) and not isinstance(model, keras.Sequential)
    if kind is None:
        whole = (subclassed or has_own_steps(model)) and OF_STAGES.isdisjoint(options)
        kind = Model if whole else PipelineModel
    return kind(model, **options)


def _compile_as(
    model: Any,
    compilation: Any,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    again: bool = False,
) -> None:
    """Compiles a distributed model as a configuration says, if it is not; takes all ranks."""
    if not compilation or (model.compiled and not again):
        return
    with world().call("compile (configuration)"), keras.saving.CustomObjectScope(custom_objects):
        given = on_all_ranks(
            world(),
            "make what the model is compiled with",
            lambda: dict(deserialized(compilation, custom_objects, safe_mode)),
        )
    given.pop("jit_compile", None)
    model.compile(**given)


def _reason_of(model: Any) -> str:
    """Why a model needs its weights before it is wrapped; empty if it does not."""
    if hides_its_graph(model) or has_own_steps(model):
        return f"{type(model).__name__} '{model.name}' is not a graph of layers with known shapes"
    if type(model).__module__.startswith("keras."):
        return ""
    for name in ("get_compile_config", "compile_from_config"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"{type(model).__name__} '{model.name}' has a {name} of its own"
    inside = {id(variable) for variable in extract(model).variables}
    outside = [variable.path for variable in model.variables if id(variable) not in inside]
    return f"no layer of its graph has {outside[:3]}" if outside else ""


def _agreed_file(filepath: Any, stack: contextlib.ExitStack, **facts: Any) -> KerasFile | None:
    """Opens a file that is the same on all ranks; `None` for one that only Keras reads."""
    path, ranks, name = path_of(filepath), world(), os.fspath(filepath)
    if path.suffix != ".keras" or "://" in name or path.is_dir():
        with ranks.call("load_model", **facts, contents=contents_of(filepath)):
            return None

    def opened() -> KerasFile:
        return stack.enter_context(contextlib.closing(KerasFile(filepath)))

    with ranks.call("load_model", **facts):
        file = on_all_ranks(ranks, f"read '{name}'", opened)
    with ranks.call("load_model (file)", contents=file.contents):
        return file
