"""What the picture of a layer graph shows, before anything has a place: boxes, links and cuts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.visualization.graph_drawing.boxes import (
    Box,
    ends_box,
    layer_box,
    run_box,
)
from tarantella_pp.partition.visualization.graph_drawing.cuts import (
    CutTensor,
    Place,
    cut_tensors,
    producer_of,
)
from tarantella_pp.partition.visualization.graph_drawing.folding import fold

MOST_ROWS = 24
"""Most boxes of a stage; more operations share boxes."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What the picture of a layer graph shows.

    Attributes:
        columns: The boxes of each stage, from above.
        links: Rows of each stage between which tensors run.
        cuts: What runs between stages.
        is_complete: Whether links are known; a plan alone knows the cuts only.
    """

    columns: tuple[tuple[Box, ...], ...]
    links: tuple[tuple[tuple[int, int], ...], ...]
    cuts: tuple[CutTensor, ...]
    is_complete: bool


def outline(plan: Plan, graph: LayerGraph | None = None) -> Outline:
    """Makes the outline of a plan."""
    if graph is not None:
        plan.check(graph)
    columns: list[list[Box]] = []
    row: dict[int, int] = {}
    feeds = _feeds(plan, graph)
    for stage in range(plan.num_stages):
        nodes = [i for i, place in enumerate(plan.assignment) if place == stage]
        names = [plan.node_names[i] for i in nodes]
        boxes = [ends_box(feeds[stage], "input")] if feeds[stage] else []
        for run in fold(names, _crossing(nodes, graph), MOST_ROWS):
            row.update((nodes[i], len(boxes)) for i in run)
            boxes.append(_box(names, run, nodes, graph))
        columns.append(boxes)
    if graph is None:
        return Outline(tuple(map(tuple, columns)), ((),) * len(columns), _cuts(plan, row), False)
    outputs = [graph.tensors[i].name for i in dict.fromkeys(graph.outputs)]
    columns[-1].append(ends_box(outputs, "output"))
    links, cuts = _wires(plan, graph, row, len(columns[-1]) - 1)
    return Outline(tuple(map(tuple, columns)), links, cuts, True)


def _feeds(plan: Plan, graph: LayerGraph | None) -> dict[int, list[str]]:
    """The inputs of the model that each stage reads."""
    names: dict[int, list[str]] = defaultdict(list)
    for tensor in graph.tensors if graph else ():
        if tensor.producer is None:
            for stage in {plan.assignment[node] for node in tensor.consumers}:
                names[stage].append(tensor.name)
    return names


def _crossing(own: Sequence[int], graph: LayerGraph | None) -> list[int]:
    """How many tensors of a stage run on behind each of its operations."""
    change = Counter[int]()
    position = {node: i for i, node in enumerate(own)}
    for tensor in graph.tensors if graph else ():
        readers = [position[node] for node in tensor.consumers if node in position]
        if tensor.producer in position and readers:
            change[position[tensor.producer]] += 1
            change[max(readers)] -= 1
    level, levels = 0, []
    for i in range(len(own)):
        level += change[i]
        levels.append(level)
    return levels


def _box(names: Sequence[str], run: range, own: Sequence[int], graph: LayerGraph | None) -> Box:
    nodes = [graph.nodes[own[i]] for i in run] if graph is not None else []
    if len(run) > 1:
        return run_box(names, run, nodes)
    return layer_box(names[run.start], own[run.start], nodes[0] if nodes else None)


def _cuts(plan: Plan, row: dict[int, int]) -> tuple[CutTensor, ...]:
    """The cuts of a plan alone: they end at the heads of stages."""
    cut_tensors: dict[Place, CutTensor] = {}
    for tensor in plan.cuts:
        source = (tensor.source, row[producer_of(plan, tensor)])
        cut = cut_tensors.setdefault(source, CutTensor(source))
        cut.tensors.append(tensor)
        cut.targets |= {(stage, -1) for stage in tensor.targets}
    return tuple(cut_tensors.values())


def _wires(
    plan: Plan, graph: LayerGraph, row: dict[int, int], last_row: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], tuple[CutTensor, ...]]:
    """The links within stages and the cuts between them."""
    links: list[set[tuple[int, int]]] = [set() for _ in plan.stages]
    cuts: dict[Place, CutTensor] = {}
    crossing = cut_tensors(plan, graph)
    end = (plan.num_stages - 1, last_row)
    for tensor in graph.tensors:
        readers = {(plan.assignment[node], row[node]) for node in tensor.consumers}
        if tensor.producer is None:
            for stage, below in readers:
                links[stage].add((0, below))
            continue
        readers |= {end} if tensor.id in graph.outputs else set()
        source = (plan.assignment[tensor.producer], row[tensor.producer])
        links[source[0]].update((source[1], r) for s, r in readers if s == source[0])
        if tensor.id in crossing:
            cut = cuts.setdefault(source, CutTensor(source))
            cut.tensors.append(crossing[tensor.id])
            cut.targets |= {place for place in readers if place[0] != source[0]}
    kept = tuple(tuple(sorted((a, b) for a, b in own if a != b)) for own in links)
    return kept, tuple(cuts.values())
