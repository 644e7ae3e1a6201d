"""Graphs that are not Keras' own, in the node-link JSON of networkx, as layer graphs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from tarantella_pp.errors import GraphError, PlanError
from tarantella_pp.partition.graph.json_record import read
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.partition.graph.units import MOST
from tarantella_pp.partition.profile import NodeProfile, Profile

# What Python says of JSON in another shape.
_MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
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
        return graph_of(_digraph(json.loads(read(path, "graph"))))
    except (GraphError, PlanError) as error:
        raise GraphError(f"{path} is no graph in node-link JSON: {error}") from error
    except (*_MISSHAPEN, nx.NetworkXException) as error:
        raise GraphError(
            f"{path} is no graph in node-link JSON: Expected what networkx.node_link_data writes: "
            "lists of nodes, each with an id, and of edges, each with source and target. "
            f"Received: {type(error).__name__}: {error}"
        ) from None


def _digraph(data: dict[str, Any]) -> nx.DiGraph:
    """Makes what a file describes, where networkx would make nodes of misspelt ends of edges."""
    links = "edges" if "edges" in data else "links"
    known = nx.node_link_graph({**data, "directed": True, links: []}, edges=links)
    found = nx.DiGraph(nx.node_link_graph({**data, "directed": True}, edges=links))
    must_hold = {
        "it must have at least one node": known,
        'it must have "directed": true': data.get("directed", True),
        'it must have "multigraph": false': not data.get("multigraph"),
        'it must have "edges" or "links". Received: both': not {"edges", "links"} <= data.keys(),
        "ids of nodes must differ": len(known) == len(data["nodes"]),
        f"edges must join nodes. Received: {[*found][len(known) :]}": len(found) == len(known),
        "no two edges may have the same ends": found.size() == len(data[links]),
    }
    for what in (what for what, holds in must_hold.items() if not holds):
        raise GraphError(what)
    return found


def graph_of(digraph: nx.DiGraph) -> NamedGraph:
    """Makes a layer graph; every operation makes one tensor, which its edges carry."""
    given = {one: place for place, one in enumerate(digraph)}
    try:
        order = [*nx.lexicographical_topological_sort(digraph, key=given.__getitem__)]
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(digraph))
        raise GraphError(f"it has a cycle, so no pipeline order: nodes {cycle}") from None
    number = {one: place for place, one in enumerate(order)}
    figures = [{k: _number(f"node {one}", k, digraph.nodes[one]) for k in FIGURES} for one in order]
    nodes: list[Node] = []
    tensors: list[Tensor] = []
    weights: list[Weight] = []
    for i, (one, own) in enumerate(zip(order, figures, strict=True)):
        name, first = _text(one), len(weights)
        for kind in ("parameters", "constants"):
            if size := int(own[kind]):
                shape, trained = (-(-size // 4),), kind == "parameters"
                weights.append(
                    Weight(len(weights), f"{name}/{kind}", shape, "float32", trained, size)
                )
        nodes.append(
            Node(
                i, name, _text(digraph.nodes[one].get("kind", "Operation")),
                inputs=tuple(sorted(number[before] for before in digraph.predecessors(one))),
                outputs=(i,), weights=tuple(range(first, len(weights))),
                parameters=int(own["parameters"]), flops=own["flops"], flops_source="analytic",
                residual_bytes=own["activations"], residual_source="analytic",
            )
        )  # fmt: skip
        readers = tuple(sorted(number[after] for after in digraph.successors(one)))
        sent = (_number(f"edge {one}", "bytes", edge) for edge in digraph[one].values())
        size = int(max(sent, default=0.0))
        tensors.append(Tensor(i, name, (None, -(-size // 4)), "float32", i, readers, size, True))
    ends = tuple(tensor.id for tensor in tensors if not tensor.consumers)
    graph = LayerGraph(tuple(nodes), tuple(tensors), (), ends, tuple(weights))
    name = _text(digraph.graph.get("name", "graph"))
    if not any(own[kind] for own in figures for kind in SECONDS):
        return NamedGraph(name, graph)
    timed = tuple(
        NodeProfile(node.name, (own[SECONDS[0]],), (own[SECONDS[1]],))
        for node, own in zip(nodes, figures, strict=True)
    )
    return NamedGraph(name, graph, Profile(name, graph.fingerprint(), 1, (1,), timed))


def _number(where: str, kind: str, attributes: dict[str, Any]) -> float:
    """Returns one figure, 0 where it is not said."""
    value = attributes.get(kind, 0.0)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if known and 0 <= value <= MOST:
        return float(value)
    raise GraphError(f"{where}: expected {kind} as a number from 0 to {MOST}. Received: {value!r}")


def _text(name: Any) -> str:
    """Returns a name that is safe to print."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))
