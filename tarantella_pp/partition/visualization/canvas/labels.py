"""Numbers and names in words that fit."""

from __future__ import annotations

import re
from collections.abc import Sequence


def percent(part: float, whole: float = 1.0) -> str:
    """Writes a share, e.g. `"12.5 %"`."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def flops(value: float) -> str:
    """Writes a number of floating point operations, e.g. `"3.87 GFLOP"`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1000
    return f"{value:.3g} {unit}FLOP"


def seconds(value: float) -> str:
    """Writes a time, e.g. `"12.5 ms"`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale or unit == "µs":
            break
    return f"{value / scale:.3g} {unit}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Writes a number of things, e.g. `"1 operation"`, `"2,000 operations"`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shorten(text: str, most: int) -> str:
    """Shortens a name in its middle, for names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def common_prefix(names: Sequence[str]) -> str:
    """Returns what all names begin with."""
    low, high = min(names), max(names)
    same = (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(same, len(low))]


def shared_prefix(names: Sequence[str]) -> str:
    """Returns what all names begin with, up to and with the last separator in it."""
    prefix = common_prefix(names)
    return prefix[: 1 + max((m.start() for m in re.finditer(r"[/_.:\- ]", prefix)), default=-1)]
