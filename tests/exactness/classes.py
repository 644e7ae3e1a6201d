"""What Keras has of a kind, read from Keras itself, so that what is new is tried as well."""

import inspect
from collections.abc import Callable, Container, Mapping
from types import ModuleType
from typing import Any


def classes_in(module: ModuleType, left_out: Container[str] = ()) -> dict[str, type]:
    """Returns the classes that a public module of Keras has, each under one name only."""
    found: dict[str, type] = {}
    public = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind)}
    for name, kind in sorted(public.items(), key=lambda item: item[1].__name__ != item[0]):
        if kind not in found.values():
            found[name] = kind
    return {name: found[name] for name in sorted(found) if name not in left_out}


def arguments_of(kind: type, known: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Values for the arguments that a class cannot be made without."""
    return {
        name: known[name]()
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
