"""What callbacks of the user's remember: their attributes that training has changed.

    constructor, on_train_begin      so many steps later        another process
    seen 0, best None, limit 3       seen 40, best 0.2          begins with seen 0, best None,
                                     -> saved: seen, best       limit 5; goes on with 40 and 0.2

What has not changed since training began is what the script says, and stays. What has changed is
given back where the other process begins with the same; otherwise it belongs to the process, as
the time when it started, or the script is another one now, and that is said. Of Keras' own
attributes `keras_internals/epochs.py` knows which are to be kept.
"""

from __future__ import annotations

import base64
import functools
import logging
import math
import pathlib
import types
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.keras_internals.epochs import set_by_keras

States = dict[str, dict[str, list[Any]]]
"""By callback and attribute: what it was when training began, and what it is."""

_ABSENT = {"absent": True}
_LARGEST = 2**63
_MANY: dict[str, Any] = {"tuple": tuple, "set": set}
_UNCHANGING = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type,
    types.ModuleType, pathlib.PurePath, logging.Logger, tf.data.Dataset, tf.DType,
)  # fmt: skip


class CallbackStates:
    """What the callbacks of this rank remember, but for those of this library."""

    def __init__(self, callbacks: Iterable[Any], trained: Sequence[Any]) -> None:
        self._callbacks = _named(callbacks)
        self._trained = trained
        self._begun: dict[str, dict[str, Any]] = {}
        self._given: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Notes what they begin with, after all have been told of the beginning."""
        self._begun = {
            name: {attribute: self._print(value) for attribute, value in _attributes(each)}
            for name, each in self._callbacks.items()
        }

    def changes(self) -> States:
        """What they have changed since, as JSON keeps it; what cannot be kept, by its kind."""
        return {name: self._changes(name, each) for name, each in self._callbacks.items()}

    def missing(self, saved: States) -> list[str]:
        """The kinds of callbacks that have something to remember and are not on this rank."""
        names = (name for name in saved if saved[name] and name not in self._callbacks)
        return [name.partition("#")[0] for name in names]

    def restore(self, saved: States) -> list[str]:
        """Gives them back what was saved."""
        self._given, notes = [], []
        for name in filter(saved.__contains__, self._callbacks):
            for attribute, (begun, now) in saved[name].items():
                problem = self._restore(name, attribute, begun, now)
                if problem:
                    notes.append(f"{name.partition('#')[0]}.{attribute} {problem}")
        return notes

    def restore_again(self) -> None:
        """Undoes what callbacks made of it when they were told of an epoch that had begun."""
        for callback, attribute, value in self._given:
            _give(callback, attribute, value)

    def _changes(self, name: str, callback: Any) -> dict[str, list[Any]]:
        begun, found = self._begun[name], {}
        values = dict(_attributes(callback))
        for attribute in [*values, *(gone for gone in begun if gone not in values)]:
            before = begun.get(attribute, _ABSENT)
            now = self._print(values[attribute]) if attribute in values else _ABSENT
            if now != before or _kind_left_out(now):
                exact = not _kind_left_out(now) and now != _ABSENT
                found[attribute] = [before, _told(values[attribute]) if exact else now]
        return found

    def _restore(self, name: str, attribute: str, begun: Any, now: Any) -> str:
        """Gives one attribute back; returns why not."""
        kind = _kind_left_out(now)
        if kind:
            return f"begins anew: {kind}"
        mine = self._begun[name].get(attribute, _ABSENT)
        if mine not in (begun, _print_of(now)):
            return "was another one when training began, and stays as it is"
        self._begun[name][attribute] = begun
        self._given.append((self._callbacks[name], attribute, now))
        _give(*self._given[-1])
        return ""

    def _print(self, value: Any) -> Any:
        """As `_told`, arrays by their checksums; of the trained model nothing is kept here."""
        return None if any(value is model for model in self._trained) else _told(value, whole=False)


def agreed(told: Sequence[States]) -> States:
    """What is the same on all ranks that have a callback, whatever other callbacks they have."""
    found: States = {}
    for name in dict.fromkeys(name for states in told for name in states):
        having = [states[name] for states in told if name in states]
        found[name] = {}
        for attribute in dict.fromkeys(attribute for each in having for attribute in each):
            first, *others = (each.get(attribute) for each in having)
            same = first is not None and all(other == first for other in others)
            found[name][attribute] = (
                first if same and first else [None, _left_out("its ranks have different values")]
            )
    return found


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Callbacks by class and number, which are the same on ranks with more or fewer of others."""
    counts: Counter[str] = Counter()
    found = {}
    for callback in callbacks:
        kind = type(callback)
        if not kind.__module__.startswith("tarantella_pp."):
            found[f"{kind.__name__}#{counts[kind.__name__]}"] = callback
            counts[kind.__name__] += 1
    return found


def _attributes(callback: Any) -> list[tuple[str, Any]]:
    """Those that are not Keras' own."""
    known = set_by_keras(type(callback))
    return [(name, value) for name, value in vars(callback).items() if name not in known]


def _told(value: Any, whole: bool = True) -> Any:
    """A value as JSON keeps it; arrays whole, or by their checksums only."""
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and -_LARGEST <= value < _LARGEST):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        kept = base64.b64encode(data).decode() if whole else zlib.crc32(data)
        return {"array": [isinstance(value, np.generic), value.dtype.str, list(value.shape), kept]}
    if kind is list:
        return _first_left_out([_told(item, whole) for item in value])
    if kind is dict:
        pairs = [[_told(key), _told(item, whole)] for key, item in value.items()]
        left = _first_left_out([part for pair in pairs for part in pair])
        return left if _kind_left_out(left) else {"dict": pairs}
    if kind.__name__ in _MANY and kind is _MANY[kind.__name__]:
        parts = [_told(item, whole) for item in value]
        if kind is set:
            parts.sort(key=repr)
        found = _first_left_out(parts)
        return found if _kind_left_out(found) else {kind.__name__: found}
    if kind is deque:
        found = _told(list(value), whole)
        return found if _kind_left_out(found) else {"deque": [found, value.maxlen]}
    if isinstance(value, _UNCHANGING) and not whole:
        return {"unchanging": True}
    return _left_out(f"it is or holds a {kind.__name__}, which is not kept")


def _print_of(told: Any) -> Any:
    """What `_told` says, when arrays are told by their checksums, of what it has told whole."""
    return told if told == _ABSENT else _told(_value(told), whole=False)


def _value(told: Any) -> Any:
    """What `_told` was given."""
    if isinstance(told, list):
        return [_value(item) for item in told]
    if not isinstance(told, dict):
        return told
    ((kind, kept),) = told.items()
    if kind == "float":
        return float(kept)
    if kind == "dict":
        return {_value(key): _value(item) for key, item in kept}
    if kind == "array":
        is_number, dtype, shape, data = kept
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return array[()] if is_number else array
    if kind == "deque":
        return deque(_value(kept[0]), kept[1])
    return _MANY[kind](map(_value, kept))


def _give(callback: Any, attribute: str, told: Any) -> None:
    """Sets an attribute; a list that others may look at too stays the same object."""
    if told == _ABSENT:
        vars(callback).pop(attribute, None)
        return
    value: Any = _value(told)
    present: Any = getattr(callback, attribute, None)
    if type(value) is not type(present) or not isinstance(value, (list, dict, set, deque)):
        setattr(callback, attribute, value)
        return
    present.clear()
    if isinstance(present, (dict, set)):
        present.update(value)
    else:
        present.extend(value)


def _left_out(why: str) -> dict[str, str]:
    return {"left out": why}


def _kind_left_out(told: Any) -> str:
    """Why a value is not kept; an empty text if it is."""
    return told.get("left out", "") if isinstance(told, Mapping) else ""


def _first_left_out(parts: list[Any]) -> Any:
    """What is left out of a list; the list, if nothing is."""
    return next(filter(_kind_left_out, parts), parts)
