"""The timeline of a step: what each rank computes when, and where it waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.visualization.canvas.labels import percent, seconds
from tarantella_pp.partition.visualization.canvas.markup import (
    Markup,
    join,
    number,
    tag,
)
from tarantella_pp.partition.visualization.canvas.palette import KIND_NAMES
from tarantella_pp.partition.visualization.canvas.picture import Picture
from tarantella_pp.partition.visualization.step_rows import Bar, StepBars

RIGHT, TOP, ROW, PITCH = 100, 34, 26, 32
STRIP = 5
"""Height of reductions, which are below the computations of their rank."""
CHARACTER = 6.1
MOST_BARS = 100_000
MOST_DETAILS = 4000
"""With more bars they have no texts of their own, so that the file stays small."""


def timeline_picture(step: StepBars) -> Picture:
    """Draws the computations of every rank."""
    if len(step.bars) > MOST_BARS:
        raise ConfigurationError(
            f"A timeline shows at most {MOST_BARS:,} computations; fewer micro-batches look alike. "
            f"Received: {len(step.bars):,}"
        )
    left = 16 + 7.3 * max(map(len, step.rank_names))
    plot = _plot_width(step, left)
    scale = plot / (step.length or 1.0)
    bottom = TOP + PITCH * len(step.rank_names)
    pieces = [_STRIPES, _legend(step), *_axis(step, left, plot, bottom)]
    for rank, name in enumerate(step.rank_names):
        pieces.append(_row(step, rank, name, left, scale))
    text = (
        f"Timeline of {len(step.rank_names)} ranks with schedule {step.name}, "
        f"bubble {percent(step.bubble)}"
    )
    return Picture(left + plot + RIGHT, bottom + 26, join(pieces), text)


def ticks(step: StepBars) -> list[tuple[float, str]]:
    """Returns times of a step to mark, and what to call them."""
    if not step.in_seconds or not step.length:
        return [(step.length * i / 4, f"{25 * i} %") for i in range(5)]
    rough = step.length / 5
    size = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    return [(i * gap, seconds(i * gap) if i else "0") for i in range(int(step.length / gap) + 1)]


def _plot_width(step: StepBars, left: float) -> float:
    """Wide enough for the bars of the busiest rank, and at least as wide as the page."""
    busiest = max((len(step.of_rank(rank)) for rank in range(len(step.rank_names))), default=0)
    return max(1196 - left - RIGHT, min(9.0 * busiest, 2400))


def _row(step: StepBars, rank: int, name: str, left: float, scale: float) -> Markup:
    y = TOP + PITCH * rank
    idle = percent(step.idle[rank])
    width = step.computed * scale
    waiting = [
        tag("title", f"{name} waits {idle} of the step"),
        tag("rect", class_="idle", x=left, y=y, width=width, height=ROW),
        tag("rect", x=left, y=y, width=width, height=ROW, fill="url(#stripes)"),
    ]
    return tag(
        "g",
        tag("text", name, class_="right", x=left - 8, y=y + 17),
        tag("g", *waiting),
        *_bars(step, rank, left, y, scale),
        tag("text", f"idle {idle}", class_="muted", x=left + step.length * scale + 8, y=y + 17),
    )


def _bars(step: StepBars, rank: int, left: float, y: float, scale: float) -> Iterator[Markup]:
    bars = step.of_rank(rank)
    if len(step.bars) > MOST_DETAILS:
        for kind in step.kinds:
            shapes = [_outline(bar, left, y, scale) for bar in bars if bar.kind == kind]
            yield tag("path", class_=f"kind{kind}", d="".join(shapes))
        return
    texts = {kind: _texts([bar for bar in bars if bar.kind == kind], scale) for kind in step.kinds}
    for bar in bars:
        x, width = left + bar.start * scale, (bar.end - bar.start) * scale
        gap = 0.8 if width > 4 else 0.0
        text = "" if bar.kind == "R" else texts[bar.kind](bar.label)
        yield tag(
            "g",
            tag("title", _hover(step, bar)),
            tag("rect", class_=f"kind{bar.kind}", x=x, width=width - gap, **_extent(bar, y)),
            *([tag("text", text, class_="ink", x=x + width / 2, y=y + 17)] if text else []),
        )


def _outline(bar: Bar, left: float, y: float, scale: float) -> str:
    width = number(max((bar.end - bar.start) * scale, 0.1))
    extent = _extent(bar, y)
    start = f"M{number(left + bar.start * scale)} {number(extent['y'])}"
    return f"{start}h{width}v{number(extent['height'])}h-{width}z"


def _extent(bar: Bar, y: float) -> dict[str, float]:
    """Where a bar is, from top to bottom: a computation in the row, a reduction below it."""
    return {"y": y + ROW, "height": STRIP} if bar.kind == "R" else {"y": y, "height": ROW}


def _texts(bars: Sequence[Bar], scale: float) -> Callable[[str], str]:
    """Chooses what stands in bars: labels where all fit, else micro-batches, else nothing."""
    forms: list[Callable[[str], str]] = [
        lambda label: label,
        lambda label: label[len(label.rstrip("0123456789")) :],
    ]
    for form in forms:
        if all(
            CHARACTER * len(form(bar.label)) + 3 <= (bar.end - bar.start) * scale for bar in bars
        ):
            return form
    return lambda label: ""


def _hover(step: StepBars, bar: Bar) -> str:
    if step.in_seconds:
        when = f"{seconds(bar.start)} to {seconds(bar.end)}"
    else:
        when = f"{percent(bar.start, step.length)} to {percent(bar.end, step.length)} of the step"
    return f"{bar.label}: {KIND_NAMES[bar.kind]}, {when}"


def _legend(step: StepBars) -> Markup:
    pieces = []
    x = 8.0
    for kind in step.kinds:
        text = f"{kind} {KIND_NAMES[kind]}"
        pieces.append(tag("rect", class_=f"kind{kind}", x=x, y=7, width=14, height=14, rx=2))
        pieces.append(tag("text", text, x=x + 20, y=18))
        x += 40 + 7.3 * len(text)
    text = f"bubble {percent(step.bubble)}"
    pieces.append(tag("rect", class_="idle", x=x, y=7, width=14, height=14))
    pieces.append(tag("rect", fill="url(#stripes)", x=x, y=7, width=14, height=14))
    pieces.append(tag("text", text, x=x + 20, y=18))
    return tag("g", *pieces)


def _axis(step: StepBars, left: float, plot: float, bottom: float) -> Iterator[Markup]:
    for at, text in ticks(step):
        x = left + plot * at / (step.length or 1.0)
        yield tag("path", class_="grid", d=f"M{x:.1f} {TOP - 4}V{bottom + 2}")
        yield tag("text", text, class_="muted middle", x=x, y=bottom + 16)


_STRIPES = tag(
    "defs",
    tag(
        "pattern",
        tag("path", class_="stripe", d="M0 0V6", stroke_width="2"),
        id="stripes",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    ),
)
