from __future__ import annotations

import itertools

import pytest

from tarantella_pp.partition.visualization.canvas.palette import (
    DARK,
    INK,
    KINDS,
    LIGHT,
    PARTS,
)

SCHEMES = pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])


def channels(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def luminance(colour):
    r, g, b = channels(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def as_deuteranope(colour):
    """What red-green blindness leaves of a colour (Vienot, Brettel and Mollon, 1999)."""
    r, g, b = channels(colour)
    return (0.29 * r + 0.71 * g, 0.29 * r + 0.71 * g, -0.02 * r + 0.02 * g + b)


@SCHEMES
def test_texts_can_be_read(scheme):
    for text, behind in itertools.product(
        (scheme.text, scheme.muted, scheme.warning), (scheme.page, scheme.card)
    ):
        assert contrast(text, behind) >= 4.5
    for colour in scheme.stages:
        assert contrast(scheme.on_stage, colour) >= 4.5
        assert contrast(colour, scheme.card) >= 3


def test_labels_of_bars_can_be_read():
    for colour in KINDS.values():
        assert contrast(INK, colour) >= 4.5


def test_neighbours_differ_for_the_colour_blind():
    for a, b in [
        *itertools.combinations(KINDS.values(), 2),
        *itertools.pairwise(PARTS.values()),
        *itertools.pairwise(LIGHT.stages + LIGHT.stages[:1]),
        *itertools.pairwise(DARK.stages + DARK.stages[:1]),
    ]:
        apart = sum((x - y) ** 2 for x, y in zip(as_deuteranope(a), as_deuteranope(b), strict=True))
        assert apart**0.5 > 0.05, (a, b)
