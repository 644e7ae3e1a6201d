"""The exceptions of this library: one class for each kind of mistake; what names them well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


class TarantellaError(Exception):
    """Base class of every exception that this library raises on its own account."""

    is_final = False  # whether a job that it has ended would end so again


class ConfigurationError(TarantellaError, ValueError):
    """An option has a value that cannot work, alone or together with the others."""


class UnsupportedModelError(TarantellaError, ValueError):
    """A Keras model, layer, loss or optimizer that the pipeline does not support."""


class GraphError(TarantellaError, ValueError):
    """A layer graph is malformed: a cycle, an unknown node, a negative or missing cost."""


class PlanError(TarantellaError, ValueError):
    """A plan is malformed, belongs to another model, or cannot meet its limits."""


class ScheduleError(TarantellaError, ValueError):
    """A schedule breaks one of the laws of pipeline schedules, or cannot be made."""


class CommunicationError(TarantellaError, RuntimeError):
    """A message between ranks is missing, late or not what the receiver expects."""


class MissingDependencyError(TarantellaError, ImportError):
    """A package that is not installed is needed for what was asked for."""


class LaunchError(TarantellaError, RuntimeError):
    """The ranks of a job could not be started, or are not what the job needs."""


class FileError(TarantellaError, OSError):
    """A file cannot be written or read: missing, damaged or not ours, or the disk is full."""


class FormatError(FileError):
    """A file is whole, but was written in a format that this version does not read."""


class StaleWeightError(TarantellaError, RuntimeError):
    """A weight that is trained on another rank is read, and its value here is out of date."""


class ReplicaError(TarantellaError, RuntimeError):
    """Replicas of a model, which must have the same weights, have not."""


# What to do where a batch cannot be cut.
UNCUT = "Use a PipelineModel with num_micro_batches=1 and num_replicas=1"
# What users of Tarantella are used to pass, and what they mean here.
_OF_TARANTELLA = {
    "num_pipeline_stages": "Here that is num_micro_batches.",
    "parallel_strategy": "tnt.Model is data parallel, tnt.PipelineModel has stages and replicas.",
    "tnt_micro_batch_size": "Here batch_size is the whole batch, over all ranks.",
    "tnt_validation_micro_batch_size": "Here validation_batch_size is that of all ranks.",
    "tnt_save_all_devices": "One file has all that any number of ranks needs.",
    **dict.fromkeys(
        ("tnt_distribute_dataset", "tnt_distribute_validation_dataset"),
        "Give all ranks the whole data, or a function of a tf.distribute.InputContext.",
    ),
}


def former_option(given: Iterable[str]) -> str:
    """Says what takes the place of an option that only Tarantella has; empty if none is given."""
    for name in _OF_TARANTELLA.keys() & given:
        return f"has no option '{name}'. {_OF_TARANTELLA[name]} See docs/tarantella.md."
    return ""


def checked_count(name: str, value: Any) -> int:
    """Reads an option that is a positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ConfigurationError(f"Expected a positive integer. Received: {name}={value!r}")
    return int(value.__index__())


# How to install what the package can be used without.
INSTALL = {
    "tensorflow": "`pip install tensorflow-cpu`, or `pip install 'tensorflow[and-cuda]'` for GPUs",
    "keras": "`pip install keras`",
}


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Runs imports; a package that is missing is an error that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL:
            raise
        raise MissingDependencyError(
            f"{what} needs {package}, which is not installed here: {INSTALL[package]}."
        ) from error


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it."""
    from importlib import metadata  # loads more modules than all else of `import tarantella_pp`

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
