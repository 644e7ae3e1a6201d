"""Makes methods of a model collective: announced to all ranks, and refused if they differ."""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import msgspec
import numpy as np

from tarantella_pp import errors
from tarantella_pp.errors import CommunicationError, ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator

_Method = TypeVar("_Method", bound=Callable[..., Any])
_T = TypeVar("_T")

_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics", "steps_per_execution")


def collective(
    *names: str, **computed: Callable[[Mapping[str, Any]], Any]
) -> Callable[[_Method], _Method]:
    """Makes a method of a `PipelineModel` one that all ranks must call alike."""

    def decorate(method: _Method) -> _Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def announced(model: Any, *args: Any, **kwargs: Any) -> Any:
            communicator = model._engine.communicator
            try:
                if former := errors.former_option(kwargs):
                    raise TypeError(former)
                given = signature.bind(model, *args, **kwargs)
            except TypeError as error:
                wrong = TypeError(f"{type(model).__name__}.{method.__name__}() {error}")
                communicator.failed(method.__name__, wrong)
                raise wrong from None
            if communicator.size == 1 or of_keras_fit(kwargs):
                return method(model, *args, **kwargs)
            given.apply_defaults()
            facts = {name: given.arguments[name] for name in names}
            facts |= {name: fact(given.arguments) for name, fact in computed.items()}
            with communicator.call(method.__name__, **facts):
                return method(model, *args, **kwargs)

        return cast(_Method, announced)

    return decorate


def of_keras_fit(kwargs: Mapping[str, Any]) -> bool:
    """Whether Keras' own `fit` calls `evaluate` so: a part of `fit`, not a call of the user's."""
    return "_use_cached_eval_dataset" in kwargs


def digest(arrays: Iterable[Any]) -> str:
    """Returns a short text that is the same for the same numbers."""
    found = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def contents_of(filepath: Any) -> str:
    """Returns a short text that is the same for files of weights with the same contents."""
    if not isinstance(filepath, (str, os.PathLike)):
        return type(filepath).__name__
    found, size = hashlib.sha256(), 0
    try:
        for path in _files(Path(filepath)):
            size += path.stat().st_size
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:  # Keras will say so, if it is the same on all ranks
        return type(error).__name__
    return f"{size} bytes, {found.hexdigest()[:16]}"


def _files(path: Path) -> list[Path]:
    """A file, or an index with the files of weights beside it; all files of a folder."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    index, shards = path.name.removesuffix(".weights.json"), "_*.weights.h5"
    return [path, *sorted(path.parent.glob(f"{glob.escape(index)}{shards}"))]


def compiled_facts(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of a compilation must be the same on all ranks, as far as that is known."""
    facts = {name: keras.tree.map_structure(_told, given[name]) for name in _COMPILED}
    optimizer = given["optimizer"]
    facts["optimizer"] = named(optimizer)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        facts |= {f"optimizer.{name}": value for name, value in _options_of(optimizer).items()}
    return facts


def hidden_options(value: Any) -> dict[str, Any]:
    """Options of a loss or metric that its `get_config` may leave out, as `Huber` does."""
    return {
        f"{name}.{option}": value
        for name, options in getattr(value, "__dict__", {}).items()
        if isinstance(options, dict)
        for option, value in options.items()
        if isinstance(value, (bool, int, float, str))
    }


def named(value: Any) -> Any:
    """A value that can be compared between processes: numbers and names."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    return getattr(value, "__name__", type(value).__name__)


def _told(value: Any) -> Any:
    """What a loss or a metric is, and its options."""
    if not isinstance(value, (keras.losses.Loss, keras.metrics.Metric)):
        return named(value)
    options = _options_of(value) | hidden_options(value)
    return f"{named(value)} {options}" if options else named(value)


def _options_of(value: Any) -> dict[str, Any]:
    """Options that look alike everywhere; none of a user's own that has no `get_config`."""
    try:
        config = nameless(value.get_config())
    except Exception:  # of a learning rate's schedule in it, too: plain Keras never asks
        return {}
    return {name: option for name, option in config.items() if _is_plain(option)}


def nameless(value: Any, names: Sequence[str] = ("name",)) -> Any:
    """A configuration without names, inside of it, too: Keras numbers what a process makes."""
    if isinstance(value, Mapping):
        return {key: nameless(part, names) for key, part in value.items() if key not in names}
    return [nameless(part, names) for part in value] if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, texts, lists and dicts, which look alike everywhere."""
    try:
        msgspec.msgpack.encode(value)
    except TypeError:
        return False
    return True


def on_one_rank(communicator: Communicator, rank: int, what: str, work: Callable[[], Any]) -> Any:
    """Lets one rank do something alone; all ranks wait for it and learn of a failure."""
    own = work if communicator.rank == rank else lambda: None
    return communicator.broadcast_json(on_all_ranks(communicator, what, own), rank)


def on_all_ranks(communicator: Communicator, what: str, work: Callable[[], _T]) -> _T:
    """Lets each rank do its part, without messages to others; where one fails, all fail."""
    failure: Exception | None = None
    try:
        result = work()
    except CommunicationError:  # others cannot hear of it
        raise
    except Exception as caught:
        failure = caught
    mine = None if failure is None else [type(failure).__name__, str(failure)]
    reasons = communicator.allgather_json(mine)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            name, text = reason
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, errors.TarantellaError)):
                kind, text = ConfigurationError, f"{name}: {text}"  # else its own class says it
            raise kind(f"Rank {communicator.world_ranks[rank]} could not {what}: {text}")
    return result
