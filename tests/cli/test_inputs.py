"""Numbers with units."""

from __future__ import annotations

import argparse

import pytest

from tarantella_pp.cli import inputs

VALUES = {
    inputs.bytes_per_second: {
        "10GB": 10e9, "10 GB/s": 10e9, "1GiB/s": 2.0**30, "100Gbit/s": 12.5e9, "8kbit": 1e3,
        "ten": None, "0": None, "-1GB": None, "10": None, "10Gb/h": None, "": None,
    },
    inputs.seconds: {
        "5us": 5e-6, "1.5ms": 1.5e-3, "2": 2.0, "300 ns": 3e-7,
        "-5us": None, "5 weeks": None, "1e999": None,
    },
    inputs.flops_per_second: {
        "1.0": 1e12, "500GFLOPs": 5e11, "2 PFLOP/s": 2e15,
        "nan": None, "0": None, "3 flops": None,
    },
    inputs.positive_int: {"7": 7, "1.5": None, "-1": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [(read, text, value) for read, values in VALUES.items() for text, value in values.items()],
)
def test_numbers_have_units_and_others_are_refused(read, text, value):
    if value is not None:
        assert read(text) == pytest.approx(value, rel=1e-12)
        return
    with pytest.raises(argparse.ArgumentTypeError, match="Received"):
        read(text)
