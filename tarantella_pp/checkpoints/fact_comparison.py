"""What training was told when a checkpoint was written, compared with what it is told now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 5


def differences(saved: Any, now: Any, where: str = "") -> list[str]:
    """What differs, each with its name and both values; at most a few."""
    found = list(_differences(saved, now, where))
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return found[:_MOST] + more


def without_names(config: Any) -> Any:
    """The configuration of a model as it is in each process: layers have numbers for names.

    Keras counts layers, so that the second `Dense` of a process is called otherwise; and objects
    that several layers share have their address for a number.
    """
    names: dict[str, str] = {}
    _collect(config, names)
    return _renamed(config, names)


def _differences(saved: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            inner = f"{where}.{key}" if where else str(key)
            yield from _differences(saved.get(key), now.get(key), inner)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(before, after, f"{where}[{number}]")
    elif saved != now:
        yield f"{where}: {_short(saved)} in the checkpoint, {_short(now)} now"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _collect(config: Any, names: dict[str, str]) -> None:
    if isinstance(config, Mapping):
        name = config.get("name")
        if isinstance(name, str):
            names.setdefault(name, f"#{len(names)}")
        for value in config.values():
            _collect(value, names)
    elif isinstance(config, list):
        for value in config:
            _collect(value, names)


def _renamed(config: Any, names: Mapping[str, str]) -> Any:
    if isinstance(config, Mapping):
        kept = {key: value for key, value in config.items() if key != "shared_object_id"}
        return {key: _renamed(value, names) for key, value in kept.items()}
    if isinstance(config, list):
        return [_renamed(value, names) for value in config]
    return names.get(config, config) if isinstance(config, str) else config
