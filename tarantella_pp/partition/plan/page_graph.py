"""The layer graph on the page of a plan: a column for each stage, and the lines between boxes.

Operations stand below each other in the order in which they run. Nothing ever crosses a box:

      rail ------------------------------+        tensors that skip stages run over the columns
      |  stage 0          stage 1        |  stage 2
      |  +-----+          +-----+        |  +-----+
     -+--| box |--bytes-->| box |--bytes-+->| box |    those for the next stage run between columns,
    (    +-----+          +-----+           +-----+    those that skip boxes of their own stage to
     --->| box |                                       the left of these
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.ideals import crossings
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node
from tarantella_pp.partition.graph.units import count, format_bytes, format_flops
from tarantella_pp.partition.plan.plan_data import PlanData
from tarantella_pp.partition.plan.plan_parts import CutEdge

# Most boxes of a stage; more operations share boxes.
MOST_BOXES = 24
# What fits in a box, and most lines of the note that is shown when one points at something.
TITLE_CHARACTERS, NOTE_CHARACTERS, MOST_LINES = 23, 27, 16
# Pixels: a column has room for links to the left of its boxes, and for labels behind it.
BOX_WIDTH, BOX_HEIGHT, PITCH = 186, 36, 48
HEAD, MARGIN, LEFT, RIGHT, GAP = 50, 6, 30, 10, 120
LABEL_WIDTH, LABEL_HEIGHT = 70, 20
# Tensors that skip stages have lanes above the columns.
LANE, MOST_LANES = 7, 12

# Stage and row; row -1 is the head of the stage.
Place = tuple[int, int]


class Box(NamedTuple):
    """An operation, a run of them, or the inputs or outputs of the model (`"end"`)."""

    title: str
    note: str
    hover: str
    role: str = "layer"


class CutTensors(NamedTuple):
    """The tensors that leave one box for boxes of other stages."""

    tensors: list[CutEdge]
    targets: set[Place]


class Outline(NamedTuple):
    """What is drawn, before anything has a place: boxes, the rows that links join, and cuts."""

    columns: list[list[Box]]
    links: list[set[tuple[int, int]]]
    cuts: Mapping[Place, CutTensors]


def graph_drawing(plan: PlanData, graph: LayerGraph | None) -> dict[str, Any]:
    """Returns the drawing; without a graph, as far as the plan alone knows it."""
    shown = outline(plan, graph)
    skipping = [
        source
        for source, cut in shown.cuts.items()
        if max(stage for stage, _ in cut.targets) > source[0] + 1
    ]
    rails = {source: MARGIN + LANE * (i % MOST_LANES) for i, source in enumerate(skipping)}
    top = max(rails.values(), default=-8) + 8 + MARGIN
    width = LEFT + BOX_WIDTH + RIGHT
    lefts = [MARGIN + (width + GAP) * stage for stage in range(plan.num_stages)]
    columns, routes = [], []
    for left, boxes, links in zip(lefts, shown.columns, shown.links, strict=True):
        place = {"x": left + LEFT, "width": BOX_WIDTH, "height": BOX_HEIGHT}
        placed = [
            {**box._asdict(), **place, "y": _middle(top, row) - BOX_HEIGHT // 2}
            for row, box in enumerate(boxes)
        ]
        height = HEAD + len(boxes) * PITCH
        paths = "".join(_link(left + LEFT, top, *rows) for rows in sorted(links))
        columns.append(
            {"x": left, "width": width, "height": height, "boxes": placed, "links": paths}
        )
    for source, cut in shown.cuts.items():
        stage, row = source
        x, y = lefts[stage] + width, _middle(top, row)
        lines = []
        for target, below in sorted(cut.targets):
            goal = lefts[target] + (0 if below < 0 else LEFT)
            rail = rails[source] if target > stage + 1 else None
            end = _middle(top, below)
            lines.append(f"M{x - RIGHT} {y}{_route(x, y, goal, end, rail)}")
        size = format_bytes(sum(tensor.bytes + tensor.mask_bytes for tensor in cut.tensors))
        hover = _lines([_sent(tensor) for tensor in cut.tensors])
        label = {"x": x + 6, "y": y, "label": size}
        routes.append({"stage": stage, "hover": hover, "paths": lines, **label})
    return {
        "text": f"{count(len(plan.node_names), 'operation')} on {count(plan.num_stages, 'stage')}, "
        f"{count(len(plan.cuts), 'tensor')} sent between stages",
        "width": lefts[-1] + width + MARGIN,
        "height": top + HEAD + max(map(len, shown.columns)) * PITCH + MARGIN,
        "top": top,
        "columns": columns,
        "routes": routes,
        "label_width": LABEL_WIDTH,
        "label_height": LABEL_HEIGHT,
    }


def outline(plan: PlanData, graph: LayerGraph | None = None) -> Outline:
    """Chooses boxes, links and cuts."""
    if graph is not None:
        plan.check(graph)
    columns: list[list[Box]] = []
    row: dict[int, int] = {}
    tensors = () if graph is None else graph.tensors
    for stage in range(plan.num_stages):
        nodes = [i for i, place in enumerate(plan.assignment) if place == stage]
        feeds = [t.name for t in tensors if t.producer is None and {*nodes} & {*t.consumers}]
        boxes = [_ends_box(feeds, "input")] if feeds else []
        most = -(-len(nodes) // MOST_BOXES)
        for start in range(0, len(nodes), most):
            run = nodes[start : start + most]
            row.update(dict.fromkeys(run, len(boxes)))
            own = [] if graph is None else [graph.nodes[i] for i in run]
            boxes.append(_layer_box([plan.node_names[i] for i in run], own, run[0]))
        columns.append(boxes)
    if graph is None:
        return Outline(columns, [set() for _ in columns], _cuts_alone(plan, row))
    outputs = [graph.tensors[i].name for i in dict.fromkeys(graph.outputs)]
    columns[-1].append(_ends_box(outputs, "output"))
    return Outline(columns, *_wires(plan, graph, row, len(columns[-1]) - 1))


def _cuts_alone(plan: PlanData, row: Mapping[int, int]) -> Mapping[Place, CutTensors]:
    """The cuts of a plan without its graph: they end at the heads of stages."""
    cuts: Mapping[Place, CutTensors] = defaultdict(lambda: CutTensors([], set()))
    nodes = {name: i for i, name in enumerate(plan.node_names)}
    for tensor in plan.cuts:
        # Tensors are named after their operation, with [0], [1] behind it if it makes several.
        own = [i for i, stage in enumerate(plan.assignment) if stage == tensor.source]
        named = [nodes.get(name) for name in (tensor.tensor, tensor.tensor.rpartition("[")[0])]
        producer = next((i for i in named if i in own), own[-1])
        cut = cuts[tensor.source, row[producer]]
        cut.tensors.append(tensor)
        cut.targets.update((stage, -1) for stage in tensor.targets)
    return cuts


def _wires(
    plan: PlanData, graph: LayerGraph, row: Mapping[int, int], last_row: int
) -> tuple[list[set[tuple[int, int]]], Mapping[Place, CutTensors]]:
    """The links within stages and the cuts between them."""
    links: list[set[tuple[int, int]]] = [set() for _ in plan.stages]
    cuts: Mapping[Place, CutTensors] = defaultdict(lambda: CutTensors([], set()))
    # By their order: Keras numbers layers anew in every process, so names need not agree.
    crossing = list(crossings(graph, plan.assignment))
    if [cut[1:] for cut in crossing] != [(cut.source, cut.targets) for cut in plan.cuts]:
        raise PlanError("The cuts of this plan are not those of its stages: make the plan again.")
    sent = {tensor.id: cut for (tensor, *_), cut in zip(crossing, plan.cuts, strict=True)}
    for tensor in graph.tensors:
        readers = {(plan.assignment[node], row[node]) for node in tensor.consumers}
        if tensor.producer is None:
            for stage, below in readers:
                links[stage].add((0, below))
            continue
        readers |= {(plan.num_stages - 1, last_row)} if tensor.id in graph.outputs else set()
        stage, above = plan.assignment[tensor.producer], row[tensor.producer]
        links[stage].update((above, below) for s, below in readers if s == stage and below > above)
        if tensor.id in sent:
            cuts[stage, above].tensors.append(sent[tensor.id])
            cuts[stage, above].targets.update(place for place in readers if place[0] != stage)
    return links, cuts


def _middle(top: int, row: int) -> int:
    """The height of the middle of a box, or of a column's head."""
    return top + (HEAD // 2 if row < 0 else HEAD + row * PITCH + BOX_HEIGHT // 2)


def _link(left: int, top: int, above: int, below: int) -> str:
    """A line to the next box, or a bow to the left of those between."""
    start, end = _middle(top, above), _middle(top, below)
    if below == above + 1:
        return f"M{left + BOX_WIDTH // 2} {start + BOX_HEIGHT // 2}V{end - BOX_HEIGHT // 2}"
    turn = left - min(16 + 2 * (below - above), LEFT)
    return f"M{left} {start + 8}C{turn} {start + 8} {turn} {end - 8} {left} {end - 8}"


def _route(x: int, y: int, goal: int, end: int, rail: int | None) -> str:
    """A line between columns, from behind a label to the goal; over those between on a rail."""
    turn, middle = x + LABEL_WIDTH + 10, (x + LABEL_WIDTH + 10 + goal) // 2
    if rail is None:
        return f"H{turn}C{middle} {y} {middle} {end} {goal} {end}"
    up, down = turn + 30, goal - 30
    return (
        f"H{turn}C{up} {y} {turn} {rail} {up} {rail}H{down}C{goal} {rail} {down} {end} {goal} {end}"
    )


def _sent(tensor: CutEdge) -> str:
    mask = f" + mask of {format_bytes(tensor.mask_bytes)}" if tensor.mask_bytes else ""
    stages = ", ".join(map(str, tensor.targets))
    size = f"{format_bytes(tensor.bytes)} of {tensor.dtype}{mask}"
    return f"{tensor.tensor}: stage {tensor.source} to {stages}, {size}"


def _layer_box(names: Sequence[str], nodes: Sequence[Node], index: int) -> Box:
    """The box of an operation, or of a run of them; nodes are known with the graph only."""
    # The layer that does most of the arithmetic says what a run is.
    busiest = max(nodes, key=lambda node: node.flops, default=None)
    kind = f"operation {index}" if busiest is None else busiest.kind
    size, flops = (sum(n.parameters + n.constants for n in nodes), sum(n.flops for n in nodes))
    facts = [f"weights {format_bytes(size)}"] if size else []
    facts += [f"{format_flops(flops)} per sample"] if flops else []
    hover, many = _lines([kind, *facts, *names]), len(names) > 1
    before = f"{len(names)} ops · " if many else ""
    behind = f" · {format_bytes(size)}" if size and not many else ""
    note = before + shorten(kind, NOTE_CHARACTERS - len(before + behind)) + behind
    return Box(_title(names), note, hover, "run" if many else "layer")


def _ends_box(names: Sequence[str], role: str) -> Box:
    """The box of the model's inputs that a stage reads, or of its outputs."""
    note = role if len(names) == 1 else count(len(names), role)
    return Box(_title(names), note, _lines([note, *names]), "end")


def _title(names: Sequence[str]) -> str:
    more = " …" if len(names) > 1 else ""
    return shorten(names[0], TITLE_CHARACTERS - 2) + more


def _lines(texts: Sequence[str]) -> str:
    """What is shown when one points at something."""
    more = len(texts) - MOST_LINES
    return "\n".join([*texts[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])])


def shorten(text: str, most: int) -> str:
    """Shortens a name in its middle, for names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
