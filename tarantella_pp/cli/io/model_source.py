"""The MODEL of a command: a graph, a `.keras` file, a function or an application."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.io.output import existing_file
from tarantella_pp.cli.io.quiet_keras import quiet_keras
from tarantella_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.node_link import NamedGraph

FORMS = "a .keras file, module:function, script.py:function, a keras.applications name"
HELP = f"{FORMS}, or a graph as .json, in networkx's node-link form"


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
        from tarantella_pp.cli.io.model_function import call

        return call(source)
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
        from tarantella_pp.keras_internals.model_files import deserialized
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
    import difflib

    close = difflib.get_close_matches(name.lower(), known, n=3)
    hint = f"Is it {' or '.join(known[key] for key in close)}?" if close else f"Expected {FORMS}."
    raise ConfigurationError(f"keras.applications has no {name}. {hint} Received: MODEL={name!r}")
