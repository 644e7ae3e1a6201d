"""What commands read: numbers with units (`"10GB"`, `"5us"`), plans, and the MODEL of a command.

A MODEL is a graph, a `.keras` file, a function that makes a model or one of `keras.applications`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.output import existing_file
from tarantella_pp.dependencies import needed_for
from tarantella_pp.errors import (
    ConfigurationError,
    MissingDependencyError,
    PlanError,
    UnsupportedModelError,
)
from tarantella_pp.launch.cause import describe
from tarantella_pp.partition.graph.units import parse_bytes

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.node_link import NamedGraph
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

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_FLOPS = {"": 1e12, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
# Help of an option that names a machine.
MACHINE = "core, p40, v100, a100, h100, h200, or a file that `HardwareSpec.save` wrote"
# Bandwidth below which a unit has been forgotten: `--nic 10` is hardly meant for 10 bytes.
_SLOWEST = 1e3
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"


def positive_int(text: str) -> int:
    """Reads a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"Expected a positive integer. Received: {text!r}")
    return value


def bytes_per_second(text: str) -> float:
    """Reads a bandwidth, such as `"10GB"`, `"10GB/s"` or `"100Gbit/s"`, in bytes per second."""
    amount = re.sub(r"/s\s*$", "", text)
    bits = re.fullmatch(rf"\s*{_NUMBER}\s*([KMGT]?)bit\s*", amount, re.IGNORECASE)
    try:
        if bits:
            return parse_bytes(f"{bits[1]}{bits[2]}B", "bandwidth") / 8
        value = float(parse_bytes(amount, "bandwidth"))
    except ConfigurationError:
        value = 0.0
    if value < _SLOWEST:
        raise argparse.ArgumentTypeError(
            "Expected a number with its unit, e.g. '10GB', '10GB/s' or '100Gbit/s'. "
            f"Received: {text!r}"
        )
    return value


def seconds(text: str) -> float:
    """Reads a time, such as `"5us"` or `"1.5ms"`; a plain number is seconds."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*({'|'.join(_SECONDS)})?\s*", text)
    value = float(match[1]) * _SECONDS[match[2] or "s"] if match else math.inf
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(
            f"Expected seconds, or e.g. '5us' or '1ms'. Received: {text!r}"
        )
    return value


def positive_seconds(text: str) -> float:
    """Reads a time over 0, in seconds or with a unit as for `seconds`."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"Expected more than 0 s. Received: {text!r}")
    return value


def flops_per_second(text: str) -> float:
    """Reads a speed, such as `"500GFLOPs"`; a plain number is TFLOP/s."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(?:([GTPE])FLOPs?(?:/s)?)?\s*", text, re.IGNORECASE)
    value = float(match[1]) * _FLOPS[(match[2] or "").upper()] if match else 0.0
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(
            f"Expected TFLOP/s of a rank, or e.g. '500GFLOPs'. Received: {text!r}"
        )
    return value


def load_plan(path: str) -> Plan:
    """Reads a plan."""
    from tarantella_pp.partition.graph.json_record import read
    from tarantella_pp.partition.plan.plan import Plan

    file = existing_file(path)
    try:
        text = read(file, "plan")
        if b'"tarantella_pp.graph_plan"' in text[:1000]:
            raise PlanError(
                "This is the plan of an external graph, as earlier versions wrote them. Write the "
                "graph as node-link JSON of networkx and make its plan again."
            )
        return Plan.from_json(text)
    except PlanError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def is_graph(source: str) -> bool:
    """Whether a MODEL is a graph that is not Keras' own."""
    return source.endswith(".json")


def read_graph(source: str) -> NamedGraph:
    """Reads a graph that is not Keras' own."""
    from tarantella_pp.partition.graph.node_link import load_graph

    return load_graph(existing_file(source))


def build_model(source: str) -> Any:
    """Makes the Keras model that a MODEL names."""
    if source.endswith(".keras"):
        path = existing_file(source)
        with quiet_keras(source) as keras:
            return keras.models.load_model(path, compile=False)
    if ":" in source:
        return _called(source)
    if source.endswith(".py"):
        raise ConfigurationError(
            f"Expected the function that makes the model as well: {source}:FUNCTION. "
            f"Received: MODEL={source!r}"
        )
    if source.isidentifier():
        return _application(source)
    raise ConfigurationError(f"Expected {FORMS}. Received: MODEL={source!r}")


def build_without_weights(source: str) -> Any:
    """Makes the Keras model that a MODEL names, with shapes and no weights, for planning.

    A graph comes as it is.
    """
    if is_graph(source):
        return read_graph(source)
    file = source.rpartition(":")[0] or source
    with quiet_keras(f"keras.applications.{file}" if file.isidentifier() else file):
        from tarantella_pp.internals.model_files import deserialized
        from tarantella_pp.models.deferred_init import only_shapes
    with only_shapes():
        if not source.endswith(".keras") or not zipfile.is_zipfile(existing_file(source)):
            return build_model(source)
        with quiet_keras(source), zipfile.ZipFile(source) as archive:
            return deserialized({**json.loads(archive.read("config.json")), "compile_config": None})


def optimizer_of(source: str, model: Any) -> Any:
    """Returns the optimizer that a model was compiled with, whose slots count as memory."""
    if not source.endswith(".keras"):
        return getattr(model, "optimizer", None)
    with quiet_keras(source) as keras:
        # Not by compiling: that would need the custom losses and metrics of the file as well.
        with zipfile.ZipFile(source) as archive:
            config = json.loads(archive.read("config.json"))  # where Keras may write Infinity
        optimizer = (config.get("compile_config") or {}).get("optimizer")
        return None if optimizer is None else keras.optimizers.get(optimizer)


def _application(name: str) -> Any:
    """Makes a model of `keras.applications`, without downloading weights."""
    with quiet_keras(f"keras.applications.{name}") as keras:
        known = {
            key.lower(): key
            for key, value in vars(keras.applications).items()
            if key[0].isupper() and callable(value)
        }
        if name.lower() in known:
            return getattr(keras.applications, known[name.lower()])(weights=None)
    close = difflib.get_close_matches(name.lower(), known, n=3)
    hint = f"Is it {' or '.join(known[key] for key in close)}?" if close else f"Expected {FORMS}."
    raise ConfigurationError(f"keras.applications has no {name}. {hint} Received: MODEL={name!r}")


def _called(source: str) -> Any:
    """Calls the function that makes a model."""
    place, _, name = source.rpartition(":")
    script = existing_file(place) if place.endswith(".py") else None
    known = script is not None or all(part.isidentifier() for part in place.split("."))
    if not name.isidentifier() or not known:
        raise ConfigurationError(
            f"Expected module:function or script.py:function. Received: MODEL={source!r}"
        )
    with quiet_keras(place) as keras:
        module = _imported(place) if script is None else _loaded(script)
        made = getattr(module, name, None)
    if not callable(made):
        raise ConfigurationError(
            f"There is no function {name!r} in {place}.{_others(module, name)}"
        )
    if not isinstance(made, keras.Model):
        _check_signature(source, made)
        with quiet_keras(f"{name}() of {place}"):
            made = made()
    if not isinstance(made, keras.Model):
        raise UnsupportedModelError(
            f"{source} must make a Keras model. Received: a value of type {type(made).__name__}"
        )
    return made


def _imported(name: str) -> ModuleType:
    """Imports a module, from the current folder as well, as `python -m` does."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(f"There is no module {error.name!r}.") from None
        raise


def _loaded(script: Path) -> ModuleType:
    """Runs a script as a module, without its `if __name__ == "__main__"`."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(script)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    # As `python script.py` would: what it imports may lie beside it.
    sys.path.insert(0, str(script.parent.resolve()))
    sys.modules.setdefault(script.stem, module)
    spec.loader.exec_module(module)
    return module


def _check_signature(source: str, function: Any) -> None:
    """Refuses a function that needs arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigurationError(
            f"Expected a function that needs no arguments. Received: {source}, which needs "
            f"{', '.join(needed)}; give it defaults, or name a function that calls it."
        )


def _others(module: ModuleType, name: str) -> str:
    """Suggests names that are there."""
    names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
    close = difflib.get_close_matches(name, names, n=3)
    return f" Is it {' or '.join(close)}?" if close else ""


@contextlib.contextmanager
def quiet_keras(what: str) -> Iterator[Any]:
    """Yields Keras while code of others runs, and tells what that raises.

    Its output does not mix with ours, nor do our options look like its own.
    """
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
            raise UnsupportedModelError(f"{what} raised {describe(error)}") from error
        finally:
            sys.argv = arguments
