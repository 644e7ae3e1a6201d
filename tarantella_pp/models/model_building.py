"""Models made of a description, or as another one is: distributed, and built by share."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.functional import hides_its_graph
from tarantella_pp.internals.model_files import deserialized
from tarantella_pp.models.data_parallel_model import Model
from tarantella_pp.models.deferred_init import deferred_init
from tarantella_pp.models.own_step_model import OwnStepModel, has_own_steps
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.comm.collective import on_all_ranks
from tarantella_pp.runtime.comm.communicator import world

logger = logging.getLogger(__name__)
_COMPILATION = "compile_config"


def model_from_config(
    config: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
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

    model = built(make, "model_from_config", options)[0]
    distributed = wrapped(model, options)
    compile_as(distributed, compilation, custom_objects)
    return distributed


def model_from_json(
    json_string: str, custom_objects: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Makes a distributed model of what `to_json()` returns; see `model_from_config`.

    Args:
        json_string: The description.
        custom_objects: Classes and functions by their names, as in Keras.
        **options: See `model_from_config`.

    Example::

        model = tnt.models.model_from_json(keras_model.to_json(), num_stages=4)
    """
    try:
        config = json.loads(json_string)
    except ValueError as error:
        raise ConfigurationError(
            f"model_from_json takes what `to_json()` of a model returns. Received: "
            f"json_string={str(json_string)[:80]!r}, which is no JSON: {error}"
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

    Example::

        twin = tnt.models.clone_model(model)
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"clone_model takes a model. Received: model={model!r} of type {type(model).__name__}"
        )
    arguments = {
        "input_tensors": input_tensors,
        "clone_function": clone_function,
        "call_function": call_function,
        "recursive": recursive or None,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    plain = model
    if isinstance(model, PipelineModel):
        plain = model._engine.extracted.model
        if not given and not options:
            options = {"plan": model.plan}
    elif isinstance(model, OwnStepModel):
        plain = model._plain
    compilation = model.get_compile_config() if model.compiled else None

    def copy() -> Any:
        return keras.models.clone_model(plain, **given)

    def copy_layers() -> Any:
        with _not_compiled(plain):
            return copy()

    whole = copy_layers if isinstance(model, PipelineModel) else copy
    made = built(copy_layers, "clone_model", options, whole)[0]
    kind = Model if isinstance(model, Model) and "num_stages" not in options else None
    clone = wrapped(made, options, kind)
    compile_as(clone, compilation)
    return clone


def built(
    make: Callable[[], Any],
    method: str,
    options: Mapping[str, Any],
    whole: Callable[[], Any] | None = None,
    of: str = "",
    reason: str = "",
) -> tuple[Any, bool]:
    """Builds a model without weights or, if that cannot be done, all of it on every rank."""
    ranks, model, drawn = world(), None, random.getstate()
    if not reason and options.get("balance") == "time":
        reason = "balance='time' runs the model on rank 0"
    if not reason:
        model, reason = _without_weights(make)
    with ranks.call(f"{method} (build)"):
        reasons = list(filter(None, ranks.allgather_json(reason)))
        if not reasons:
            return model, True
        random.setstate(drawn)  # so that weights have the seeds of a model built at once
        model = _with_weights(whole or make, f"{method} cannot build {of or 'the model'}")
    if 1 < ranks.size == ranks.rank + 1:
        logger.warning(
            "%s builds all of the model on every rank, not each its share: %s", method, reasons[0]
        )
    return model, False


def _without_weights(make: Callable[[], Any]) -> tuple[Any, str]:
    """Builds a model without weights; says why if that cannot be done."""
    scope = deferred_init()
    scope.__enter__()  # where the ranks meet: what they do not agree on is no reason, but an error
    try:
        with contextlib.ExitStack() as stack:
            stack.push(scope)
            model = make()
        return model, _reason_of(model)
    except Exception as error:  # what cannot be done so, or not at all, which is found out next
        return None, f"{type(error).__name__}: {error}"


def _with_weights(make: Callable[[], Any], failed: str) -> Any:
    """Builds a model on each rank; where one cannot, all fail."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(make())
        except Exception as error:
            raise ConfigurationError(f"{failed}: {type(error).__name__}: {error}") from error

    on_all_ranks(world(), "build the model", work)
    return found[0]


def wrapped(model: Any, options: Mapping[str, Any], kind: Any = None) -> Any:
    """Makes a model a distributed one."""
    subclassed = hides_its_graph(model) and not isinstance(model, keras.Sequential)
    unknown = set(options) - set(inspect.signature(Model.__init__).parameters)
    if kind is None:
        whole = (subclassed or has_own_steps(model)) and not unknown
        kind = Model if whole else PipelineModel
    return kind(model, **options)


def compile_as(
    model: Any,
    compilation: Any,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
) -> None:
    """Compiles a distributed model as a configuration says, if it is not; takes all ranks."""
    if not compilation or model.compiled:
        return
    given: dict[str, Any] = {}
    with world().call("compile (configuration)"), keras.saving.CustomObjectScope(custom_objects):
        on_all_ranks(
            world(),
            "make what the model is compiled with",
            lambda: given.update(deserialized(compilation, custom_objects, safe_mode)),
        )
        given.pop("jit_compile", None)
    model.compile(**given)


def _reason_of(model: Any) -> str:
    """Why a model needs its weights before it is wrapped; empty if it does not."""
    if hides_its_graph(model) or has_own_steps(model):
        return f"{type(model).__name__} '{model.name}' is not a graph of layers with known shapes"
    if type(model).__module__.startswith("keras."):
        return ""
    for name in ("compile", "get_compile_config", "compile_from_config"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"{type(model).__name__} '{model.name}' has a {name} of its own"
    inside = {id(variable) for variable in extract(model).variables}
    outside = [variable.path for variable in model.variables if id(variable) not in inside]
    return f"no layer of its graph has {outside[:3]}" if outside else ""


@contextlib.contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """Has Keras clone a model without its compilation."""
    before = model.compiled
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = before
