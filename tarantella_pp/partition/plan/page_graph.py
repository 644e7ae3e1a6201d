"""The layer graph on the page of a plan: a column for each stage, and the lines between boxes.

Operations stand below each other in the order in which they run. Nothing ever crosses a box:

      rail ------------------------------+        tensors that skip stages run over the columns
      |  stage 0          stage 1        |  stage 2
      |  +-----+          +-----+        |  +-----+
    +-+--| box |--bytes-->| box |--bytes-+->| box |    tensors between stages have lanes between
    |    +-----+          +-----+           +-----+    columns; those that skip boxes within one
    +--->| box |                                       have lanes to the left of its boxes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.ideals import crossings
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import count, format_bytes
from tarantella_pp.partition.plan.page_pictures import Box, coordinate, ends_box, fold, layer_box
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import CutEdge

# Most boxes of a stage; more operations share boxes.
MOST_BOXES = 24
BOX_WIDTH, BOX_HEIGHT, PITCH = 186, 36, 48
HEAD, PAD, LANE, MARGIN = 50, 10, 7, 6
LABEL_WIDTH, LABEL_HEIGHT = 70, 20

# Stage and row; row -1 is the head of the stage.
Place = tuple[int, int]
Points = list[tuple[float, float]]
Span = tuple[float, float]


@dataclass(slots=True)
class CutTensors:
    """The tensors that leave one box for boxes of other stages."""

    source: Place
    targets: set[Place] = field(default_factory=set)
    tensors: list[CutEdge] = field(default_factory=list)


class Outline(NamedTuple):
    """What is drawn, before anything has a place: boxes, the rows that links join, and cuts."""

    columns: list[list[Box]]
    links: list[list[tuple[int, int]]]
    cuts: list[CutTensors]


class Layout(NamedTuple):
    """Where everything is; columns have a left end, a width and the left end of their boxes."""

    width: float
    height: float
    top: float
    columns: list[tuple[float, float, float]]
    links: list[list[Points]]
    routes: list[list[Points]]


def graph_drawing(plan: PlanData, graph: LayerGraph | None) -> dict[str, Any]:
    """Returns the drawing; without a graph, as far as the plan alone knows it."""
    shown = outline(plan, graph)
    layout = lay_out(shown)
    columns, routes = [], []
    for stage, (left, width, boxes_left) in enumerate(layout.columns):
        shape = {"x": boxes_left, "width": BOX_WIDTH, "height": BOX_HEIGHT}
        boxes = [
            {**box._asdict(), **shape, "y": middle(layout.top, row) - BOX_HEIGHT / 2}
            for row, box in enumerate(shown.columns[stage])
        ]
        links = _drawn(layout.links[stage])
        place = {"x": left, "width": width, "height": HEAD + len(boxes) * PITCH}
        columns.append({**place, "boxes": boxes, "links": links})
    for cut, paths in zip(shown.cuts, layout.routes, strict=True):
        stage, row = cut.source
        left, width, _ = layout.columns[stage]
        size = sum(tensor.bytes + tensor.mask_bytes for tensor in cut.tensors)
        label = {"x": left + width + 6, "y": middle(layout.top, row), "label": format_bytes(size)}
        routes.append({"stage": stage, "hover": _hover(cut.tensors), **label, **_drawn(paths)})
    return {
        "text": f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}, "
        f"{count(len(plan.cuts), 'tensor')} sent between stages",
        "width": layout.width, "height": layout.height, "top": layout.top,
        "columns": columns, "routes": routes,
        "label_width": LABEL_WIDTH, "label_height": LABEL_HEIGHT,
    }  # fmt: skip


def outline(plan: PlanData, graph: LayerGraph | None = None) -> Outline:
    """Chooses boxes, links and cuts."""
    if graph is not None:
        plan.check(graph)
    columns: list[list[Box]] = []
    row: dict[int, int] = {}
    tensors = () if graph is None else graph.tensors
    for stage in range(plan.num_stages):
        nodes = [i for i, place in enumerate(plan.assignment) if place == stage]
        names = [plan.node_names[i] for i in nodes]
        feeds = [t.name for t in tensors if t.producer is None and {*nodes} & {*t.consumers}]
        boxes = [ends_box(feeds, "input")] if feeds else []
        for run in fold(names, _crossing(nodes, graph), MOST_BOXES):
            row.update((nodes[i], len(boxes)) for i in run)
            own = [] if graph is None else [graph.nodes[nodes[i]] for i in run]
            boxes.append(layer_box(names, run, own, nodes[run.start]))
        columns.append(boxes)
    if graph is None:
        return Outline(columns, [[] for _ in columns], _cuts_alone(plan, row))
    outputs = [graph.tensors[i].name for i in dict.fromkeys(graph.outputs)]
    columns[-1].append(ends_box(outputs, "output"))
    return Outline(columns, *_wires(plan, graph, row, len(columns[-1]) - 1))


def _crossing(own: Sequence[int], graph: LayerGraph | None) -> list[int]:
    """How many tensors of a stage run on behind each of its operations."""
    position = {node: i for i, node in enumerate(own)}
    levels = [0] * len(own)
    for tensor in graph.tensors if graph else ():
        readers = [position[node] for node in tensor.consumers if node in position]
        if tensor.producer in position and readers:
            for i in range(position[tensor.producer], max(readers)):
                levels[i] += 1
    return levels


def _cuts_alone(plan: PlanData, row: dict[int, int]) -> list[CutTensors]:
    """The cuts of a plan without its graph: they end at the heads of stages."""
    cuts: dict[Place, CutTensors] = {}
    for tensor in plan.cuts:
        own = [i for i, stage in enumerate(plan.assignment) if stage == tensor.source]
        # Tensors are named after their operation, with [0], [1] behind it if it makes several.
        names = (tensor.tensor, tensor.tensor.rpartition("[")[0])
        producer = next((i for i in own if plan.node_names[i] in names), own[-1])
        source = (tensor.source, row[producer])
        cut = cuts.setdefault(source, CutTensors(source))
        cut.tensors.append(tensor)
        cut.targets |= {(stage, -1) for stage in tensor.targets}
    return list(cuts.values())


def _wires(
    plan: PlanData, graph: LayerGraph, row: dict[int, int], last_row: int
) -> tuple[list[list[tuple[int, int]]], list[CutTensors]]:
    """The links within stages and the cuts between them."""
    links: list[set[tuple[int, int]]] = [set() for _ in plan.stages]
    cuts: dict[Place, CutTensors] = {}
    crossing = _cut_edges(plan, graph)
    for tensor in graph.tensors:
        readers = {(plan.assignment[node], row[node]) for node in tensor.consumers}
        if tensor.producer is None:
            for stage, below in readers:
                links[stage].add((0, below))
            continue
        readers |= {(plan.num_stages - 1, last_row)} if tensor.id in graph.outputs else set()
        source = (plan.assignment[tensor.producer], row[tensor.producer])
        links[source[0]].update((source[1], r) for s, r in readers if s == source[0])
        if tensor.id in crossing:
            cut = cuts.setdefault(source, CutTensors(source))
            cut.tensors.append(crossing[tensor.id])
            cut.targets |= {place for place in readers if place[0] != source[0]}
    return [sorted((a, b) for a, b in own if a != b) for own in links], list(cuts.values())


def _cut_edges(plan: PlanData, graph: LayerGraph) -> dict[int, CutEdge]:
    """The plan's cut of each tensor that crosses stages."""
    # By their order: Keras numbers layers anew in every process, so names need not agree.
    found, cuts = {}, iter(plan.cuts)
    for tensor, source, targets in crossings(graph, plan.assignment):
        cut = next(cuts, None)
        if cut is None or (cut.source, cut.targets) != (source, targets):
            raise PlanError(f"The plan has no cut for '{tensor.name}', which crosses stages.")
        found[tensor.id] = cut
    for extra in cuts:
        raise PlanError(f"The plan cuts '{extra.tensor}', which stays on its stage.")
    return found


def lay_out(outline: Outline) -> Layout:
    """Gives everything its place."""
    skips = [_lanes(_reach(own)) for own in outline.links]
    spans = {i: (c.source[0], max(s for s, _ in c.targets)) for i, c in enumerate(outline.cuts)}
    rails = _lanes({i: span for i, span in spans.items() if span[1] > span[0] + 1})
    channels = [_channel(outline, column, rails) for column in range(len(outline.columns))]
    top = MARGIN + (8 + LANE * (1 + max(rails.values())) if rails else 0)
    columns, x = [], float(MARGIN)
    for inner, channel in zip(skips, channels, strict=True):
        lanes = 1 + max(inner.values(), default=-1)
        left = x + PAD + (lanes * LANE + 6 if lanes else 0)
        columns.append((x, left + BOX_WIDTH + PAD - x, left))
        x = left + BOX_WIDTH + PAD + LABEL_WIDTH + 26 + LANE * max(channel.values(), default=0)
    links = [
        [_link(link, left, top, inner) for link in own]
        for own, (_, _, left), inner in zip(outline.links, columns, skips, strict=True)
    ]
    right = columns[-1][0] + columns[-1][1]
    height = top + HEAD + max(map(len, outline.columns)) * PITCH + MARGIN
    routes = _routes(outline, top, columns, channels, rails)
    return Layout(right + MARGIN, height, top, columns, links, routes)


def middle(top: float, row: int) -> float:
    """Returns the height of the middle of a box, or of a column's head."""
    return top + (HEAD / 2 if row < 0 else HEAD + row * PITCH + BOX_HEIGHT / 2)


def _lanes(spans: dict[int, Span]) -> dict[int, int]:
    """Gives each span a lane in which it meets no other one; greedy, which needs the fewest."""
    ends: list[float] = []
    lanes = {}
    # By their starts: then a lane that is free at a start stays free to its end.
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        lane = next((i for i, taken in enumerate(ends) if taken <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[key] = lane
    return lanes


def _reach(links: Iterable[tuple[int, int]]) -> dict[int, Span]:
    """The rows whose tensors skip boxes, and how far down these go."""
    reach: dict[int, Span] = {}
    for above, below in links:
        if below > above + 1:
            reach[above] = (above, max(below, reach.get(above, (0, 0))[1]))
    return reach


def _link(link: tuple[int, int], left: float, top: float, lanes: dict[int, int]) -> Points:
    above, below = link
    start, end = middle(top, above), middle(top, below)
    if below == above + 1:
        x = left + BOX_WIDTH / 2
        return [(x, start + BOX_HEIGHT / 2), (x, end - BOX_HEIGHT / 2)]
    x = left - 8 - LANE * lanes[above]
    return [(left, start + 8), (x, start + 8), (x, end - 8), (left, end - 8)]


def _channel(outline: Outline, column: int, rails: dict[int, int]) -> dict[int, int]:
    """The lane of each cut in the channel behind a column."""
    spans = {}
    for i, cut in enumerate(outline.cuts):
        heights = [float(row) for stage, row in cut.targets if stage == column + 1]
        heights += [cut.source[1]] if cut.source[0] == column else []
        if heights:
            heights += [-2] if i in rails else []  # rails run above the heads of columns
            spans[i] = (min(heights) - 0.4, max(heights) + 0.4)
    return _lanes(spans)


def _routes(
    outline: Outline, top: float, columns: Sequence[tuple[float, float, float]],
    channels: Sequence[dict[int, int]], rails: dict[int, int],
) -> list[list[Points]]:  # fmt: skip
    """The lines between columns: one for each target of each cut."""
    arrivals: dict[Place, list[int]] = defaultdict(list)
    for i, cut in enumerate(outline.cuts):
        for place in sorted(cut.targets):
            arrivals[place].append(i)

    def lane_x(column: int, cut: int) -> float:
        left, width, _ = columns[column]
        return left + width + LABEL_WIDTH + 12 + LANE * channels[column][cut]

    routes = []
    for i, cut in enumerate(outline.cuts):
        column, row = cut.source
        y, out = middle(top, row), lane_x(column, i)
        paths = []
        for stage, below in sorted(cut.targets):
            points: Points = [(columns[column][2] + BOX_WIDTH, y), (out, y)]
            if stage > column + 1:
                rail = MARGIN + LANE * rails[i]
                points += [(out, rail), (lane_x(stage - 1, i), rail)]
            arriving = arrivals[stage, below]
            gap = min(6.0, (BOX_HEIGHT - 12) / len(arriving))  # lines end beside each other
            end = middle(top, below) + gap * (arriving.index(i) - (len(arriving) - 1) / 2)
            goal = columns[stage][0] if below < 0 else columns[stage][2]
            paths.append([*points, (points[-1][0], end), (goal, end)])
        routes.append(paths)
    return routes


def _hover(tensors: Sequence[CutEdge]) -> str:
    lines = []
    for tensor in tensors[:16]:
        stages = ", ".join(map(str, tensor.targets))
        extra = f" + mask of {format_bytes(tensor.mask_bytes)}" if tensor.mask_bytes else ""
        lines.append(
            f"{tensor.tensor}: stage {tensor.source} to {stages}, "
            f"{format_bytes(tensor.bytes)} of {tensor.dtype}{extra}"
        )
    more = len(tensors) - len(lines)
    return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def _drawn(paths: Sequence[Points]) -> dict[str, str]:
    """Lines with round corners, and the arrows at their ends; nothing for none."""
    if not paths:
        return {}
    return {"line": " ".join(map(_rounded, paths)), "head": " ".join(map(_arrow, paths))}


def _rounded(points: Points, radius: float = 5) -> str:
    commands = [f"M{_at(*points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        start, end = _towards(corner, before, radius), _towards(corner, after, radius)
        commands.append(f"L{_at(*start)}Q{_at(*corner)} {_at(*end)}")
    return "".join([*commands, f"L{_at(*points[-1])}"])


def _towards(
    start: tuple[float, float], end: tuple[float, float], most: float
) -> tuple[float, float]:
    """The point at most this far from the start of a line, or its middle where that comes first."""
    length = abs(end[0] - start[0]) + abs(end[1] - start[1])
    share = min(most, length / 2) / length if length else 0.0
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _arrow(points: Points) -> str:
    (x, y), (from_x, _) = points[-1], points[-2]
    if from_x == x:
        return f"M{_at(x - 3.5, y - 6)}L{_at(x + 3.5, y - 6)}L{_at(x, y)}Z"
    return f"M{_at(x - 6, y - 3.5)}L{_at(x - 6, y + 3.5)}L{_at(x, y)}Z"


def _at(x: float, y: float) -> str:
    return f"{coordinate(x)} {coordinate(y)}"
