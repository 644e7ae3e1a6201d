"""The layer graph in the language of Graphviz."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Tensor
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import CutEdge, Plan
from tarantella_pp.partition.visualization.canvas.palette import LIGHT, stage_class
from tarantella_pp.partition.visualization.graph_drawing.cuts import cut_tensors, producer_of


def render_dot(plan: Plan, graph: LayerGraph | None = None) -> str:
    """Writes the layer graph for Graphviz: stages are clusters, cut edges carry their bytes."""
    if graph is not None:
        plan.check(graph)
    lines = [
        f"digraph {quote(plan.model)} {{",
        "  compound=true; rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace"];',
        '  edge [color="#526070", fontname="monospace"];',
    ]
    for stage in range(plan.num_stages):
        lines += _cluster(plan, graph, stage)
    lines += _cut_edges(plan) if graph is None else _edges(plan, graph)
    return "\n".join([*lines, "}"]) + "\n"


def quote(text: str) -> str:
    """Writes text as a string of DOT."""
    text = re.sub("[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]", " ", text)
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _cluster(plan: Plan, graph: LayerGraph | None, stage: int) -> Iterator[str]:
    memory = format_bytes(plan.stages[stage].memory_bytes)
    colour = _colour(stage)
    yield f"  subgraph cluster_{stage} {{"
    yield f'    label={quote(f"Stage {stage}: {memory}")}; color="{colour}"; penwidth=2;'
    for i, place in enumerate(plan.assignment):
        if place == stage:
            kind = f"\n{graph.nodes[i].kind}" if graph is not None else ""
            yield f'    n{i} [label={quote(plan.node_names[i] + kind)}, color="{colour}"];'
    if graph is not None and stage == plan.num_stages - 1:
        yield '    outputs [label="outputs", shape=ellipse];'
    yield "  }"


def _edges(plan: Plan, graph: LayerGraph) -> Iterator[str]:
    """All edges; of a tensor's edges to a stage, the first has the bytes."""
    cuts = cut_tensors(plan, graph)
    for tensor in graph.tensors:
        if tensor.producer is None:
            if tensor.consumers:
                yield f"  i{tensor.id} [label={quote(tensor.name)}, shape=ellipse];"
            yield from (f"  i{tensor.id} -> n{node};" for node in tensor.consumers)
        else:
            yield from _tensor_edges(plan, graph, tensor, cuts.get(tensor.id))


def _tensor_edges(
    plan: Plan, graph: LayerGraph, tensor: Tensor, cut: CutEdge | None
) -> Iterator[str]:
    readers = [(plan.assignment[node], f"n{node}") for node in tensor.consumers]
    if tensor.id in graph.outputs:
        readers.append((plan.num_stages - 1, "outputs"))
    seen: set[int] = set()
    for stage, reader in readers:
        crosses = cut is not None and stage != cut.source
        style = _style(cut, labelled=stage not in seen) if cut and crosses else ""
        seen.add(stage)
        yield f"  n{tensor.producer} -> {reader}{style};"


def _cut_edges(plan: Plan) -> Iterator[str]:
    first = {stage: i for i, stage in reversed([*enumerate(plan.assignment)])}
    for cut in plan.cuts:
        for stage in cut.targets:
            style = _style(cut, labelled=True, more=f", lhead=cluster_{stage}")
            yield f"  n{producer_of(plan, cut)} -> n{first[stage]}{style};"


def _style(cut: CutEdge, *, labelled: bool, more: str = "") -> str:
    label = f", label={quote(format_bytes(cut.bytes + cut.mask_bytes))}" if labelled else ""
    return f' [color="{_colour(cut.source)}", penwidth=2.5{label}{more}]'


def _colour(stage: int) -> str:
    return LIGHT.stages[stage_class(stage)]
