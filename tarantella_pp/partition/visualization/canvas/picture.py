"""A picture before it stands somewhere: its size, its shapes and what it shows in words."""

from __future__ import annotations

from dataclasses import dataclass

from tarantella_pp.partition.visualization.canvas.markup import (
    Markup,
    join,
    number,
    tag,
)
from tarantella_pp.partition.visualization.canvas.style_sheet import picture_style

LEGIBLE = 0.75
"""How far text of 12 pixels may shrink."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing.

    Attributes:
        width: Its width in pixels.
        height: Its height in pixels.
        shapes: What is drawn.
        text: What is to be seen, for those who do not see it.
    """

    width: float
    height: float
    shapes: Markup
    text: str

    def inside(self, y: float | None = None, *, fit: bool = False) -> Markup:
        """Returns the element for a page or picture that brings the colours."""
        size = f"width:100%;max-width:{self.width:.0f}px;min-width:{LEGIBLE * self.width:.0f}px"
        return tag(
            "svg",
            self.shapes,
            class_="picture",
            role="img",
            aria_label=self.text,
            width=self.width,
            height=self.height,
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
            y=y,
            style=f"{size};height:auto" if fit else None,
        )

    def alone(self) -> str:
        """Returns a whole SVG file."""
        body = tag(
            "svg",
            tag("title", self.text),
            tag("style", Markup(picture_style())),
            tag("rect", class_="card", width="100%", height="100%"),
            self.shapes,
            xmlns="http://www.w3.org/2000/svg",
            class_="picture",
            width=self.width,
            height=self.height,
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
        )
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def below_each_other(pictures: list[Picture], gap: float = 24) -> Picture:
    """Puts pictures into one."""
    pieces = []
    y = 0.0
    for picture in pictures:
        pieces.append(picture.inside(y))
        y += picture.height + gap
    width = max(picture.width for picture in pictures)
    return Picture(width, y - gap, join(pieces), "; ".join(p.text for p in pictures))
