"""Graphs that are not Keras' own, in the node-link JSON of networkx, as layer graphs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.errors import GraphError
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.partition.graph.profile import NodeProfile, Profile

if TYPE_CHECKING:
    import networkx as nx

# Files larger than this are refused before they are read.
MAX_FILE_BYTES = 512 * 2**20
# Numbers whose sums are finite.
MOST = 1e200
# What operations take, per sample.
SECONDS = ("forward_seconds", "backward_seconds")
# What a node may say of itself; bytes but for the first, of samples but for variables.
FIGURES = ("flops", "parameters", "constants", "activations", *SECONDS)


@dataclass(frozen=True, slots=True)
class NamedGraph:
    """A layer graph that no Keras model stands behind."""

    name: str  # its name
    graph: LayerGraph  # the graph
    profile: Profile | None = None  # seconds of its operations, if its file says them


def load_graph(path: str | Path) -> NamedGraph:
    """Reads a graph from a JSON file."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GraphError(f"The graph {path} cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise GraphError(f"{path} is larger than a graph may be ({MAX_FILE_BYTES} bytes).")
    try:
        return loads_graph(text)
    except GraphError as error:
        raise GraphError(f"{path} is no graph in node-link JSON: {error}") from error


def loads_graph(text: str | bytes) -> NamedGraph:
    """Reads a graph from JSON text."""
    import networkx as nx

    try:
        data = json.loads(text)
        links = "edges" if "edges" in data else "links"
        digraph = nx.node_link_graph({**data, "directed": True}, edges=links)
        digraph = nx.DiGraph(digraph)
    except (ValueError, TypeError, KeyError, RecursionError, nx.NetworkXException) as error:
        raise GraphError(
            "Expected what networkx.node_link_data writes: lists of nodes, each with an id, and of "
            f"edges, each with source and target. Received: {type(error).__name__}: {error}"
        ) from None
    return graph_of(digraph)


def graph_of(digraph: nx.DiGraph) -> NamedGraph:
    """Makes a layer graph; every operation makes one tensor, which its edges carry."""
    import networkx as nx

    if not len(digraph):
        raise GraphError("A graph has at least one node. Received: nodes=[]")
    place = {one: number for number, one in enumerate(digraph)}
    try:
        order = [*nx.lexicographical_topological_sort(digraph, key=place.__getitem__)]
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(digraph))
        raise GraphError(
            f"The graph has a cycle, so it has no pipeline order: nodes {cycle}"
        ) from None
    number = {one: place for place, one in enumerate(order)}
    figures = [_figures(one, digraph.nodes[one]) for one in order]
    nodes: list[Node] = []
    tensors: list[Tensor] = []
    weights: list[Weight] = []
    for one, own in zip(order, figures, strict=True):
        ids = []
        for kind, trainable in (("parameters", True), ("constants", False)):
            size = int(own[kind])
            if size:
                ids.append(len(weights))
                name = f"{_text(one)}/{kind}"
                weights.append(Weight(ids[-1], name, (-(-size // 4),), "float32", trainable, size))
        i, readers = number[one], sorted(number[after] for after in digraph.successors(one))
        sent = [
            _number(f"edge {one}", "bytes", data) for _, _, data in digraph.out_edges(one, True)
        ]
        size = int(max(sent, default=0.0))
        nodes.append(
            Node(
                i, _text(one), _text(digraph.nodes[one].get("kind", "Operation")),
                inputs=tuple(sorted(number[before] for before in digraph.predecessors(one))),
                outputs=(i,), weights=tuple(ids), parameters=int(own["parameters"]),
                constants=int(own["constants"]), flops=own["flops"], flops_source="analytic",
                residual_bytes=own["activations"], residual_source="analytic",
            )
        )  # fmt: skip
        tensors.append(
            Tensor(i, _text(one), (None, -(-size // 4)), "float32", i, tuple(readers), size, True)
        )
    ends = tuple(i for i, tensor in enumerate(tensors) if not tensor.consumers)
    graph = LayerGraph(tuple(nodes), tuple(tensors), (), ends, tuple(weights))
    name = _text(digraph.graph.get("name", "graph"))
    return NamedGraph(name, graph, _profile(name, graph, figures))


def _profile(name: str, graph: LayerGraph, figures: list[dict[str, float]]) -> Profile | None:
    """Returns the seconds of operations, if any has some."""
    if not any(own[kind] for own in figures for kind in SECONDS):
        return None
    timed = tuple(
        NodeProfile(node.name, (own[SECONDS[0]],), (own[SECONDS[1]],))
        for node, own in zip(graph.nodes, figures, strict=True)
    )
    return Profile(name, graph.fingerprint(), 1, (1,), timed)


def _figures(one: Any, attributes: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a node."""
    return {kind: _number(f"node {one}", kind, attributes) for kind in FIGURES}


def _number(where: str, kind: str, attributes: Mapping[str, Any]) -> float:
    """Returns one figure, 0 where it is not said."""
    value = attributes.get(kind, 0.0)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if known and math.isfinite(value) and 0 <= value <= MOST:
        return float(value)
    raise GraphError(
        f"{where}: expected {kind} as a number that is not negative. Received: {value!r}"
    )


def _text(name: Any) -> str:
    """Returns a name that is safe to print."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))
