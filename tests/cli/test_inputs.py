"""Numbers with units."""

from __future__ import annotations

import argparse

import pytest

from tarantella_pp.cli import inputs


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (inputs.bytes_per_second, "10GB", 10e9),
        (inputs.bytes_per_second, "10 GB/s", 10e9),
        (inputs.bytes_per_second, "1GiB/s", 2.0**30),
        (inputs.bytes_per_second, "100Gbit/s", 12.5e9),
        (inputs.bytes_per_second, "8kbit", 1e3),
        (inputs.seconds, "5us", 5e-6),
        (inputs.seconds, "1.5ms", 1.5e-3),
        (inputs.seconds, "2", 2.0),
        (inputs.seconds, "300 ns", 3e-7),
        (inputs.flops_per_second, "1.0", 1e12),
        (inputs.flops_per_second, "500GFLOPs", 5e11),
        (inputs.flops_per_second, "2 PFLOP/s", 2e15),
        (inputs.positive_int, "7", 7),
    ],
)
def test_values(read, text, value) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (inputs.bytes_per_second, "ten"),
        (inputs.bytes_per_second, "0"),
        (inputs.bytes_per_second, "-1GB"),
        (inputs.bytes_per_second, "10"),
        (inputs.bytes_per_second, "10Gb/h"),
        (inputs.seconds, "-5us"),
        (inputs.seconds, "5 weeks"),
        (inputs.seconds, "1e999"),
        (inputs.flops_per_second, "1e999"),
        (inputs.flops_per_second, "0"),
        (inputs.flops_per_second, "3 flops"),
        (inputs.positive_int, "1.5"),
        (inputs.positive_int, "-1"),
    ],
)
def test_what_is_none(read, text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="Received"):
        read(text)
