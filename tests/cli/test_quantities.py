"""Numbers with units."""

from __future__ import annotations

import argparse

import pytest

from tarantella_pp.cli import quantities


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (quantities.bytes_per_second, "10GB", 10e9),
        (quantities.bytes_per_second, "10 GB/s", 10e9),
        (quantities.bytes_per_second, "1GiB/s", 2.0**30),
        (quantities.bytes_per_second, "100Gbit/s", 12.5e9),
        (quantities.bytes_per_second, "8kbit", 1e3),
        (quantities.seconds, "5us", 5e-6),
        (quantities.seconds, "1.5ms", 1.5e-3),
        (quantities.seconds, "2", 2.0),
        (quantities.seconds, "300 ns", 3e-7),
        (quantities.flops_per_second, "1.0", 1e12),
        (quantities.flops_per_second, "500GFLOPs", 5e11),
        (quantities.flops_per_second, "2 PFLOP/s", 2e15),
        (quantities.positive_int, "7", 7),
    ],
)
def test_values(read, text, value) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (quantities.bytes_per_second, "0"),
        (quantities.bytes_per_second, "-1GB"),
        (quantities.bytes_per_second, "10"),
        (quantities.bytes_per_second, "10Gb/h"),
        (quantities.seconds, "-5us"),
        (quantities.seconds, "5 weeks"),
        (quantities.seconds, "1e999"),
        (quantities.flops_per_second, "1e999"),
        (quantities.flops_per_second, "3 flops"),
        (quantities.positive_int, "1.5"),
        (quantities.positive_int, "-1"),
    ],
)
def test_what_is_none(read, text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="Received"):
        read(text)
