"""The colours of pictures, light and dark; told apart with every kind of colour blindness.

Those of computations and memory are of the palette of Okabe and Ito ("Color Universal Design",
2008), the same in both schemes, with dark text on them. Those of stages carry text and lines, so
each scheme has its own. Colour never is the only mark: stages, kinds and parts are named as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheme:
    """The colours of one scheme.

    Attributes:
        page: Behind everything.
        card: Behind tables and pictures.
        text: Text on either.
        muted: Text that matters less.
        line: Borders and lines of a grid.
        idle: Stripes of the time in which a rank waits.
        warning: What is over a limit.
        stages: Colours of stages, used in turn.
        on_stage: Text on them.
    """

    page: str
    card: str
    text: str
    muted: str
    line: str
    idle: str
    warning: str
    stages: tuple[str, ...]
    on_stage: str


LIGHT = Scheme(
    page="#f3f5f8",
    card="#ffffff",
    text="#16202b",
    muted="#526070",
    line="#d3dae2",
    idle="#b9c3ce",
    warning="#b3261e",
    stages=(
        "#0a66a8",
        "#ad5100",
        "#00755a",
        "#a3377f",
        "#5a4fc0",
        "#7d6300",
        "#4d5b69",
        "#b23a2c",
    ),
    on_stage="#ffffff",
)
DARK = Scheme(
    page="#10151b",
    card="#182028",
    text="#e8edf2",
    muted="#a3b1bf",
    line="#34414e",
    idle="#607386",
    warning="#ff8a80",
    stages=(
        "#5cb3ea",
        "#f0a04b",
        "#3cc49d",
        "#e38fc3",
        "#a9a0ff",
        "#d9bd45",
        "#aab8c5",
        "#ff8f7d",
    ),
    on_stage="#0c1116",
)

INK = "#101418"
"""Text on the colours below."""

KINDS = {"F": "#56b4e9", "B": "#e69f00", "W": "#2ab98a", "BW": "#e0793a", "R": "#cc79a7"}
"""Colour of each kind of computation, and of reductions."""

KIND_NAMES = {
    "F": "forward",
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "backward (both gradients)",
    "R": "reduction over replicas",
}

PARTS = {
    "weights": "#2b83ba",
    "gradients": "#8fcbec",
    "optimizer": "#2ab98a",
    "activations": "#e69f00",
    "recomputed": "#f0e442",
    "working": "#a6761d",
    "buffers": "#cc79a7",
}
"""Colour of each part of a stage's memory, from the bottom."""


def stage_class(stage: int) -> int:
    """Returns which of the colours of stages a stage has."""
    return stage % len(LIGHT.stages)
