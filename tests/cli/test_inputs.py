"""Numbers of options."""

from __future__ import annotations

import argparse

import pytest

from tarantella_pp.cli import inputs

VALUES = {
    inputs.positive_seconds: {"90": 90.0, "0.5": 0.5, "0": None, "nan": None, "5us": None},
    inputs.positive_int: {"7": 7, "1.5": None, "-1": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [(read, text, value) for read, values in VALUES.items() for text, value in values.items()],
)
def test_numbers_are_read_and_others_refused(read, text, value):
    if value is not None:
        assert read(text) == pytest.approx(value, rel=1e-12)
        return
    with pytest.raises(argparse.ArgumentTypeError, match="Received"):
        read(text)
