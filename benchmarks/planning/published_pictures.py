"""Pictures for the page of published tables.

    python benchmarks/planning/published_pictures.py docs/pictures

The memory of the largest U-Net's stages, as planned, and table 5 of the zero-bubble paper as bars.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planning.published import UNETS, bubble_rows, planned_memory, searched_rows
from tarantella_pp.partition.visualization.canvas.markup import Markup, join, tag
from tarantella_pp.partition.visualization.canvas.picture import Picture
from tarantella_pp.partition.visualization.svg import render_svg

LEFT, TOP, PLOT, BAR, GAP, MOST = 48, 34, 220, 13, 22, 0.3
SERIES = (
    ("1F1B", "kindBW", "bubble", 3, 4),
    ("ZB-H1", "kindB", "bubble", 5, 6),
    ("interleaved", "kindR", "bubble", 7, 8),
    ("ZB-2p, zb-auto", "kindW", "searched", 3, 4),
)
"""Name, colour, table, and the columns of the published rate and of ours."""


def table_5() -> Picture:
    """Draws published rates, pale, beside ours."""
    tables = {"bubble": list(bubble_rows())[1:], "searched": list(searched_rows())[1:]}
    pieces: list[Markup] = []
    group = 2 * BAR * len(SERIES) + GAP
    width = LEFT + group * len(tables["bubble"])
    for level in range(0, 31, 10):
        y = TOP + PLOT * (1 - level / 100 / MOST)
        pieces.append(tag("path", class_="grid", d=f"M{LEFT} {y:.1f}H{width}"))
        pieces.append(tag("text", f"{level} %", class_="muted right", x=LEFT - 6, y=y + 4))
    for row, cells in enumerate(tables["bubble"]):
        x = LEFT + group * row + GAP / 2
        label = f"{cells[0]}, {cells[1]} x {cells[2]}"
        middle = x + (group - GAP) / 2
        pieces.append(tag("text", label, class_="middle", x=middle, y=TOP + PLOT + 18))
        for series in SERIES:
            pieces += _pair(series, tables[series[2]][row], x)
            x += 2 * BAR
    for place, (name, colour, *_) in enumerate(SERIES):
        x, y = LEFT + 150 * place, TOP + PLOT + 34
        pieces.append(tag("rect", class_=colour, x=x, y=y, width=12, height=12, rx=2))
        pieces.append(tag("text", name, x=x + 18, y=y + 10))
    heading = "Idle part of the longest rank: published (pale) and simulated"
    pieces.append(tag("text", heading, class_="strong", x=8, y=18))
    return Picture(width, TOP + PLOT + 56, join(pieces), heading)


def _pair(series: tuple[str, str, str, int, int], cells: Sequence[str], x: float) -> list[Markup]:
    """The published bar and ours."""
    name, colour, _, *columns = series
    found = []
    for place, (column, opacity) in enumerate(zip(columns, ("0.45", None), strict=True)):
        height = PLOT * float(cells[column]) / MOST
        what = f"{name}, {'simulated' if place else 'published'}: {cells[column]}"
        bar = {"x": x + BAR * place, "y": TOP + PLOT - height, "width": BAR - 1, "height": height}
        shape = tag("rect", class_=colour, fill_opacity=opacity, **bar)
        found.append(tag("g", tag("title", what), shape))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    (folder / "table5.svg").write_text(table_5().alone(), encoding="utf-8")
    plan = planned_memory(UNETS[-1], "memory")
    (folder / "unet.svg").write_text(render_svg(plan, "memory"), encoding="utf-8")


if __name__ == "__main__":
    main()
