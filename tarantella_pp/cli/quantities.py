"""Numbers with units on the command line: `"10GB"`, `"5us"`, `"12.5TFLOPs"`."""

from __future__ import annotations

import argparse
import math
import re

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.units import parse_bytes

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_FLOPS = {"": 1e12, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
MACHINE = "core, p40, v100, a100, h100, h200, or a file that `HardwareSpec.save` wrote"
"""Help of an option that names a machine."""
_SLOWEST = 1e3
"""Bandwidth below which a unit has been forgotten: `--nic 10` is hardly meant for 10 bytes."""
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
