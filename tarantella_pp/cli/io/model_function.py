"""Models that a function of the user's makes: `module:function` and `script.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tarantella_pp.cli.io.output import existing_file
from tarantella_pp.cli.io.quiet_keras import quiet_keras
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError


def call(source: str) -> Any:
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
    """Runs a script as a module, so that what is under `if __name__ == "__main__"` stays out."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(script)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
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
