"""Sizes of shapes and dtypes, and quantities in words: `"16GB"` to a number and back."""

from __future__ import annotations

import functools
import math
import numbers
import re

from tarantella_pp.errors import ConfigurationError

#: Sums of amounts up to it are finite.
MOST = 1e200
Shape = tuple[int | None, ...]


def parse_bytes(value: int | float | str, name: str) -> int:
    """Reads a number of bytes."""
    number = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGTP])(i?))?B?\s*", value, re.IGNORECASE)
        if match:
            power = "KMGTP".index(match[2].upper()) + 1 if match[2] else 0
            number = float(match[1]) * (1024 if match[3] else 1000) ** power
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
    if number is None or not math.isfinite(number) or number < 1:
        raise ConfigurationError(
            f"Expected a number of bytes or text such as '16GB' or '512MiB'. "
            f"Received: {name}={value!r}"
        )
    return int(number)


def format_bytes(value: float, *, short: bool = False) -> str:
    """Writes a number of bytes with three significant digits, 1024-based, e.g. `"14.9 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{unit[0]}" if short else f"{value:.{digits}f} {unit}"


def format_seconds(value: float) -> str:
    """Writes a time with three significant digits, e.g. `"12.5 ms"`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def format_flops(value: float) -> str:
    """Writes a number of floating point operations, e.g. `"3.87 GFLOP"`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1000
    return f"{value:.3g} {unit}FLOP"


def percent(part: float, whole: float = 1.0) -> str:
    """Writes a share, e.g. `"12.5 %"`."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def count(number: int, noun: str) -> str:
    """Writes a number of things, e.g. `"1 batch"`, `"2,000 batches"`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def sample_shape(shape: Shape, assumed_size: int) -> tuple[int, ...]:
    """Returns the shape of one sample."""
    sizes = list(shape)
    if None in sizes:
        sizes.remove(None)
    elif sizes:
        sizes.pop(0)
    return tuple(assumed_size if size is None else size for size in sizes)


def wire_bytes(size: int, dtype: str, narrow: str | None) -> int:
    """Returns the bytes of a tensor as it is sent; floating point numbers may travel in less."""
    own = item_bytes(dtype)
    if narrow is None or not dtype.startswith("float"):
        return size
    return size // own * min(own, item_bytes(narrow))


@functools.cache
def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a dtype, given by name, e.g. `"bfloat16"`."""
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(1, int(digits.group()) // 8)
