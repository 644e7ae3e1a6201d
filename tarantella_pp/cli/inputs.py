"""What commands read: numbers, plans, and the MODEL of a command.

A MODEL is a graph, a `.keras` file, a function that makes a model or one of `keras.applications`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tarantella_pp.cause import describe
from tarantella_pp.cli.output import existing_file
from tarantella_pp.errors import (
    ConfigurationError,
    MissingDependencyError,
    PlanError,
    UnsupportedModelError,
    needed_for,
)
from tarantella_pp.schedule import TRAINING_NAMES

if TYPE_CHECKING:
    from tarantella_pp.partition.plan.plan import Plan

FORMS = "a .keras file, module:function, script.py:function, a keras.applications name"
HELP = f"{FORMS}, or a graph as .json, in networkx's node-link form"
# Planning computes nothing: it must not take an accelerator from a job, and the variable of oneDNN
# saves a line on stderr.
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

# What options name: a schedule, and a machine.
SCHEDULES = ", ".join(TRAINING_NAMES)
MACHINE = "core, p40, v100, a100, h100, h200, or a file that `HardwareSpec.save` wrote"


def positive_int(text: str) -> int:
    """Reads a positive integer."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"Expected a positive integer. Received: {text!r}")
    return int(text)


def positive_seconds(text: str) -> float:
    """Reads a time."""
    value = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"Expected more than 0 seconds. Received: {text!r}")
    return value


def shell_words(text: str) -> str:
    """Reads words as a shell would take them: their quotes must be closed."""
    with contextlib.suppress(ValueError):
        return text if shlex.split(text) else ""
    raise argparse.ArgumentTypeError(f"Expected words with closed quotes. Received: {text!r}")


def load_plan(path: str) -> Plan:
    """Reads a plan."""
    from tarantella_pp.partition.plan.plan import Plan

    try:
        return Plan.load(existing_file(path))
    except PlanError as error:
        raise ConfigurationError(str(error)) from None


def is_graph(source: str) -> bool:
    """Whether a MODEL is a graph that is not Keras' own."""
    return source.endswith(".json")


def build_model(source: str) -> Any:
    """Makes the Keras model that a MODEL names."""
    if source.endswith(".keras"):
        _config(source)  # for Keras would say of a damaged one that it is not there
        with quiet_keras(source) as keras:
            return keras.models.load_model(source, compile=False)
    if ":" in source:
        return _called(source)
    if source.isidentifier():
        return _application(source)
    raise ConfigurationError(f"Expected {FORMS}. Received: MODEL={source!r}")


def build_without_weights(source: str) -> Any:
    """Makes the Keras model of a MODEL, with shapes and no weights; a graph comes as it is."""
    if is_graph(source):
        from tarantella_pp.partition.node_link import load_graph

        return load_graph(existing_file(source))
    config, script = None, source.rpartition(":")[0]
    if source.endswith(".keras"):  # before what takes seconds is loaded
        config = _config(source)
    elif script.endswith(".py"):
        existing_file(script)
    with quiet_keras(f"keras.applications.{source}" if source.isidentifier() else source):
        from tarantella_pp.models.deferred_init import described_model, only_shapes
    with only_shapes():
        if config is None:
            return build_model(source)
        with quiet_keras(source):
            return described_model(config)


def optimizer_of(source: str, model: Any) -> Any:
    """Returns the optimizer that a model was compiled with, whose slots count as memory."""
    if not source.endswith(".keras"):
        return getattr(model, "optimizer", None)
    with quiet_keras(source) as keras:
        # Not by compiling: that would need the custom losses and metrics of the file as well.
        optimizer = (_config(source).get("compile_config") or {}).get("optimizer")
        return None if optimizer is None else keras.optimizers.get(optimizer)


def _config(file: str) -> dict[str, Any]:
    """The configuration in a `.keras` file."""
    path = existing_file(file)
    try:
        with zipfile.ZipFile(path) as archive:
            config: dict[str, Any] = json.loads(archive.read("config.json"))  # may have Infinity
    except (zipfile.BadZipFile, KeyError, ValueError):
        raise ConfigurationError(
            f"{file!r} is damaged, or no .keras file: save it again."
        ) from None
    return config


def _application(name: str) -> Any:
    with quiet_keras(f"keras.applications.{name}") as keras:
        found = vars(keras.applications).items()
        known = {key.lower(): made for key, made in found if key[0].isupper() and callable(made)}
        if name.lower() in known:
            return known[name.lower()](weights=None)
    raise ConfigurationError(f"keras.applications has no {name}. Received: MODEL={name!r}")


def _called(source: str) -> Any:
    place, _, name = source.rpartition(":")
    script = existing_file(place) if place.endswith(".py") else None
    known = script is not None or all(part.isidentifier() for part in place.split("."))
    if not name.isidentifier() or not known:
        raise ConfigurationError(
            f"Expected module:function or script.py:function. Received: MODEL={source!r}"
        )
    with quiet_keras(place) as keras:
        if script is not None:
            module = _loaded(script, name)
        else:  # from the current folder as well, as `python -m` does
            sys.path[:0] = [] if {os.getcwd(), ""} & {*sys.path} else [os.getcwd()]
            module = importlib.import_module(place)
        made = getattr(module, name, None)
    if not callable(made):
        raise ConfigurationError(f"There is no function {name!r} in {place}.")
    if not isinstance(made, keras.Model):
        with quiet_keras(f"{name}() of {place}"):
            made = made()
    if not isinstance(made, keras.Model):
        raise UnsupportedModelError(
            f"{source} must make a Keras model. Received: a value of type {type(made).__name__}"
        )
    return made


def _loaded(script: Path, name: str) -> ModuleType:
    """Runs a script as a module; what fails once it has defined a name does not count."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(script)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    # As `python script.py` would: what it imports may lie beside it.
    sys.path.insert(0, str(script.parent.resolve()))
    sys.modules.setdefault(script.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit):
        if not hasattr(module, name):
            raise
    return module


@contextlib.contextmanager
def quiet_keras(what: str) -> Iterator[Any]:
    """Yields Keras while code of others runs, with its output and our options out of the way."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    arguments, sys.argv = sys.argv, sys.argv[:1]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with needed_for(what):
                import keras

                yield keras
        except (ConfigurationError, MissingDependencyError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            own = " Layers of your own: name a function that makes the model, script.py:function."
            advice = own if what.endswith(".keras") else ""
            raise UnsupportedModelError(f"{what} raised {describe(error)}.{advice}") from error
        finally:
            sys.argv = arguments
