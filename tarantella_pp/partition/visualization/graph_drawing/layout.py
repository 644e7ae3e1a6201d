"""Where the boxes of a layer graph stand and the lines between them run, in pixels.

Stages are columns; their operations stand below each other in the order in which they run. Tensors
that skip boxes run in lanes to the left of these, tensors between stages in lanes between columns,
and those that skip stages over rails above them; so nothing ever crosses a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tarantella_pp.partition.visualization.graph_drawing.cuts import CutTensor, Place
from tarantella_pp.partition.visualization.graph_drawing.outline import Outline

BOX_WIDTH, BOX_HEIGHT, PITCH = 186, 36, 48
HEAD = 50
PAD = 10
LANE = 7
LABEL_WIDTH, LABEL_HEIGHT = 70, 20
MARGIN = 6

Points = list[tuple[float, float]]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Route:
    """The lines of one cut.

    Attributes:
        cut: The cut.
        paths: One line for each target, from the box that makes the tensors.
        label: Left middle of the place for its bytes.
    """

    cut: CutTensor
    paths: tuple[Points, ...]
    label: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is.

    Attributes:
        width: Width of all.
        height: Height of all.
        top: Upper end of the columns.
        columns: Left end and width of each column.
        boxes: Left end of the boxes of each column.
        links: Lines within each column.
        routes: Lines between columns.
    """

    width: float
    height: float
    top: float
    columns: tuple[tuple[float, float], ...]
    boxes: tuple[float, ...]
    links: tuple[tuple[Points, ...], ...]
    routes: tuple[Route, ...]


def lay_out(outline: Outline) -> Layout:
    """Gives everything its place."""
    skips = [_skips(own) for own in outline.links]
    rails = _rails(outline.cuts)
    top = MARGIN + (8 + LANE * (1 + max(rails.values())) if rails else 0)
    channels = [_channel(outline, c, rails) for c in range(len(outline.columns))]
    columns, boxes = [], []
    x: float = MARGIN
    for inner, channel in zip(skips, channels, strict=True):
        lanes = 1 + max(inner.values(), default=-1)
        left = x + PAD + (lanes * LANE + 6 if lanes else 0)
        boxes.append(left)
        columns.append((x, left + BOX_WIDTH + PAD - x))
        x = left + BOX_WIDTH + PAD + _channel_width(channel)
    last, width = columns[-1]
    rows = max(map(len, outline.columns))
    frame = Layout(
        width=last + width + MARGIN,
        height=top + HEAD + rows * PITCH + MARGIN,
        top=top,
        columns=tuple(columns),
        boxes=tuple(boxes),
        links=tuple(
            tuple(_link(a, b, left, top, inner) for a, b in own)
            for own, left, inner in zip(outline.links, boxes, skips, strict=True)
        ),
        routes=(),
    )
    return _with_routes(frame, outline, channels, rails)


def middle(top: float, row: int) -> float:
    """Returns the height of the middle of a box, or of a column's head."""
    return top + (HEAD / 2 if row < 0 else HEAD + row * PITCH + BOX_HEIGHT / 2)


def _lanes(spans: Iterable[tuple[int, Span]]) -> dict[int, int]:
    """Gives each span a lane in which it meets no other one; greedy, which needs the fewest."""
    ends: list[float] = []
    lanes = {}
    for key, (start, end) in sorted(spans, key=lambda item: item[1]):
        lane = next((i for i, taken in enumerate(ends) if taken <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[key] = lane
    return lanes


def _skips(links: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The lane of each row whose tensors skip boxes."""
    reach: dict[int, int] = {}
    for above, below in links:
        if below > above + 1:
            reach[above] = max(below, reach.get(above, 0))
    return _lanes((above, (above, below)) for above, below in reach.items())


def _link(above: int, below: int, left: float, top: float, lanes: dict[int, int]) -> Points:
    start, end = middle(top, above), middle(top, below)
    if below == above + 1:
        x = left + BOX_WIDTH / 2
        return [(x, start + BOX_HEIGHT / 2), (x, end - BOX_HEIGHT / 2)]
    x = left - 8 - LANE * lanes[above]
    return [(left, start + 8), (x, start + 8), (x, end - 8), (left, end - 8)]


def _rails(cuts: Sequence[CutTensor]) -> dict[int, int]:
    """The rail of each cut that skips stages."""
    spans = [(i, (c.source[0], max(stage for stage, _ in c.targets))) for i, c in enumerate(cuts)]
    return _lanes((i, span) for i, span in spans if span[1] > span[0] + 1)


def _channel(outline: Outline, column: int, rails: dict[int, int]) -> dict[int, int]:
    """The lane of each cut in the channel behind a column."""
    spans = []
    for i, cut in enumerate(outline.cuts):
        heights = [float(row) for stage, row in cut.targets if stage == column + 1]
        starts_here = cut.source[0] == column
        if not (heights or starts_here):
            continue
        if starts_here:
            heights.append(cut.source[1])
        if i in rails:
            heights.append(-2)
        spans.append((i, (min(heights) - 0.4, max(heights) + 0.4)))
    return _lanes(spans)


def _channel_width(lanes: dict[int, int]) -> float:
    return LABEL_WIDTH + 12 + LANE * max(lanes.values(), default=0) + 14


def _with_routes(
    frame: Layout, outline: Outline, channels: Sequence[dict[int, int]], rails: dict[int, int]
) -> Layout:
    """Adds the lines between columns."""
    arrivals: dict[Place, list[int]] = defaultdict(list)
    for i, cut in enumerate(outline.cuts):
        for place in sorted(cut.targets):
            arrivals[place].append(i)

    def lane_x(column: int, cut: int) -> float:
        left, width = frame.columns[column]
        return left + width + LABEL_WIDTH + 12 + LANE * channels[column][cut]

    routes = []
    for i, cut in enumerate(outline.cuts):
        column, row = cut.source
        start, y = frame.boxes[column] + BOX_WIDTH, middle(frame.top, row)
        out = lane_x(column, i)
        paths = []
        for stage, below in sorted(cut.targets):
            points: Points = [(start, y), (out, y)]
            if stage > column + 1:
                rail, entry = MARGIN + LANE * rails[i], lane_x(stage - 1, i)
                points += [(out, rail), (entry, rail)]
            end = middle(frame.top, below) + _spread(arrivals[stage, below], i)
            goal = frame.columns[stage][0] if below < 0 else frame.boxes[stage]
            paths.append([*points, (points[-1][0], end), (goal, end)])
        left, width = frame.columns[column]
        routes.append(Route(cut, tuple(paths), (left + width + 6, y)))
    return replace(frame, routes=tuple(routes))


def _spread(arriving: Sequence[int], one: int) -> float:
    """How far from the middle of a box one of the cuts that reach it ends."""
    gap = min(6.0, (BOX_HEIGHT - 12) / len(arriving))
    return gap * (arriving.index(one) - (len(arriving) - 1) / 2)
