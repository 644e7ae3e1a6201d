"""Layer graphs of any origin as JSON: read, checked, and made a partition problem."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tarantella_pp.errors import ConfigurationError, GraphError
from tarantella_pp.partition.external import json_fields as fields
from tarantella_pp.partition.external.json_fields import (
    no_constant,
    no_repeats,
    shown,
)
from tarantella_pp.partition.solvers.problem.digraph import adjacency, find_cycle
from tarantella_pp.partition.solvers.problem.problem import (
    Objective,
    Problem,
    TensorCost,
)

#: Stages of a pipeline at the most.
MAX_STAGES = 4096
#: Files larger than this are refused before they are read.
MAX_BYTES = 512 * 1024 * 1024
_NODE_COSTS = ("time", "memory", "flops", "time_cpu", "fw_time", "bw_time", "params", "activation")
_NODE_FIELDS = frozenset(["id", "name", "members", *_NODE_COSTS])
_EDGE_FIELDS = frozenset(["src", "dst", "comm", "bytes", "tensor"])
_TENSOR_FIELDS = frozenset(["id", "src", "nodes", "comm", "bytes", "kind"])
_TOP_FIELDS = frozenset(["name", "family", "mode", "units", "meta", "nodes", "edges", "tensors"])


@dataclass(frozen=True, slots=True)
class ExternalNode:
    """An operation of an external graph.

    Attributes:
        name: Its name, for people.
        time: Time it takes.
        memory: Bytes it holds, all told.
        flops: Floating-point operations, 0.0 where the file does not say.
    """

    name: str
    time: float
    memory: float
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class ExternalGraph:
    """A layer graph without a framework.

    Attributes:
        name: Its name.
        nodes: The operations; their ids are their places in this tuple.
        edges: Precedence pairs (before, after).
        tensors: What travels between stages.
        units: What costs are measured in, for people, e.g. `{"time": "ms", "memory": "bytes"}`.
    """

    name: str
    nodes: tuple[ExternalNode, ...]
    edges: tuple[tuple[int, int], ...]
    tensors: tuple[TensorCost, ...]
    units: Mapping[str, str] = field(default_factory=dict, hash=False)


def load_graph(path: str | Path) -> ExternalGraph:
    """Reads an external graph from a JSON file.

    Args:
        path: The file.

    Returns:
        The checked graph.

    Raises:
        GraphError: The file is missing, too large, not JSON, or breaks a rule of the format;
            the message names the place.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise GraphError(
                f"{path} is larger than a graph may be ({MAX_BYTES} bytes). Received: {size} bytes"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise GraphError(f"The graph {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise GraphError(f"{path} is not UTF-8 text: {error}") from error
    try:
        return loads_graph(text)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error


def loads_graph(text: str) -> ExternalGraph:
    """Reads an external graph from JSON text.

    Args:
        text: The JSON.

    Returns:
        The checked graph.

    Raises:
        GraphError: The text is not JSON or breaks a rule of the format.
    """
    try:
        data = json.loads(text, parse_constant=no_constant, object_pairs_hook=no_repeats)
    except GraphError:
        raise
    except (ValueError, RecursionError) as error:
        raise GraphError(f"Not JSON: {str(error)[:200]}") from error
    return graph_from_dict(data)


def graph_from_dict(data: Any) -> ExternalGraph:
    """Checks an external graph that is already parsed.

    Args:
        data: The JSON object: `nodes` (id, time, memory ...), `edges` (src, dst, comm, bytes,
            tensor) and `tensors` (id, src, nodes, comm, bytes).

    Returns:
        The checked graph.

    Raises:
        GraphError: It breaks a rule of the format.
    """
    top = fields.record(data, "graph", _TOP_FIELDS, ("nodes", "edges"))
    nodes = _nodes(fields.items(top["nodes"], "nodes"))
    count = len(nodes)
    edges, loose = _edges(fields.items(top["edges"], "edges"), count)
    if "tensors" in top:
        tensors = _tensors(fields.items(top["tensors"], "tensors"), count)
        _check_references(loose, len(tensors))
    else:
        tensors = _tensors_of_edges(top["edges"])
    name = fields.text(top.get("name", "graph"), "`name`")
    graph = ExternalGraph(name, nodes, edges, tensors, _units(top.get("units", {})))
    _check_acyclic(graph)
    return graph


def to_problem(
    graph: ExternalGraph,
    num_stages: int,
    objective: Objective,
    *,
    memory_limit: float | Sequence[float] | None = None,
    exactly: bool = False,
) -> Problem:
    """Makes the partition problem of an external graph; memory and time count as given.

    Args:
        graph: The graph.
        num_stages: Stages; at most that many are used.
        objective: What the largest stage is measured in.
        memory_limit: Bytes that a stage may hold, one number or one for each stage.
        exactly: Whether every stage must have a node.

    Returns:
        The problem.

    Raises:
        ConfigurationError: There are more stages than any pipeline has.
        PlanError: An option is out of range.
    """
    if num_stages > MAX_STAGES:
        raise ConfigurationError(
            f"A pipeline has at most {MAX_STAGES} stages. Received: num_stages={num_stages}"
        )
    work = [node.flops if objective == "flops" else node.time for node in graph.nodes]
    return Problem(
        num_stages=num_stages,
        objective=objective,
        work=np.array(work),
        static_memory=np.array([node.memory for node in graph.nodes]),
        activation_memory=np.zeros(len(graph.nodes)),
        tensors=graph.tensors,
        edges=np.array(graph.edges, dtype=np.int64).reshape(-1, 2),
        memory_limit=memory_limit,
        exactly=exactly,
    )


def _units(value: Any) -> dict[str, str]:
    found = fields.record(value, "units", None, ())
    return {
        fields.text(key, "a key of units"): fields.text(unit, f"units.{key}")
        for key, unit in found.items()
    }


def _nodes(records: list[Any]) -> tuple[ExternalNode, ...]:
    if not records:
        raise GraphError("A graph has at least one node. Received: nodes=[]")
    nodes = []
    for place, record in enumerate(records):
        where = f"nodes[{place}]"
        node = fields.record(record, where, _NODE_FIELDS, ("id", "time", "memory"))
        if fields.index(node["id"], f"{where}.id", len(records)) != place:
            raise GraphError(
                f"{where}.id: node ids count 0, 1, 2 ... in order. Received: {shown(node['id'])}"
            )
        name = fields.text(node.get("name", f"node{place}"), f"{where}.name")
        costs = {key: fields.cost(node.get(key, 0.0), f"{where}.{key}") for key in _NODE_COSTS}
        nodes.append(ExternalNode(name, costs["time"], costs["memory"], costs["flops"]))
    return tuple(nodes)


def _edges(records: list[Any], count: int) -> tuple[tuple[tuple[int, int], ...], list[Any]]:
    """Returns the precedence pairs, and the tensor that each edge names."""
    edges, named = [], []
    for place, record in enumerate(records):
        where = f"edges[{place}]"
        edge = fields.record(record, where, _EDGE_FIELDS, ("src", "dst"))
        before = fields.index(edge["src"], f"{where}.src", count)
        after = fields.index(edge["dst"], f"{where}.dst", count)
        if before == after:
            raise GraphError(f"{where} leads from node {before} to itself.")
        for key in ("comm", "bytes"):
            fields.cost(edge.get(key, 0.0), f"{where}.{key}")
        edges.append((before, after))
        named.append((where, edge.get("tensor")))
    return tuple(edges), named


def _check_references(named: Iterable[tuple[str, Any]], count: int) -> None:
    for where, tensor in named:
        if tensor is not None:
            fields.index(tensor, f"{where}.tensor", count)


def _tensors(records: list[Any], count: int) -> tuple[TensorCost, ...]:
    tensors = []
    for place, record in enumerate(records):
        where = f"tensors[{place}]"
        tensor = fields.record(record, where, _TENSOR_FIELDS, ("id", "nodes", "comm"))
        if fields.index(tensor["id"], f"{where}.id", len(records)) != place:
            raise GraphError(f"{where}.id: tensor ids count 0, 1, 2 ... in order.")
        nodes = [
            fields.index(node, f"{where}.nodes", count)
            for node in fields.items(tensor["nodes"], f"{where}.nodes")
        ]
        source = tensor.get("src")
        if source is not None:
            source = fields.index(source, f"{where}.src", count)
            if source not in nodes:
                raise GraphError(f"{where}.nodes lacks its own src. Received: {shown(nodes)}")
        if not nodes or len(set(nodes)) < len(nodes):
            raise GraphError(f"{where}.nodes names each node once. Received: {shown(nodes)}")
        comm = fields.cost(tensor["comm"], f"{where}.comm")
        size = fields.cost(tensor.get("bytes", 0.0), f"{where}.bytes")
        tensors.append(TensorCost(source, tuple(nodes), comm, size))
    return tuple(tensors)


def _tensors_of_edges(records: list[dict[str, Any]]) -> tuple[TensorCost, ...]:
    """Makes one tensor of each edge, for files that list none."""
    return tuple(
        TensorCost(
            edge["src"],
            (edge["src"], edge["dst"]),
            float(edge.get("comm", 0.0)),
            float(edge.get("bytes", 0.0)),
        )
        for edge in records
    )


def _check_acyclic(graph: ExternalGraph) -> None:
    preds, _ = adjacency(len(graph.nodes), graph.edges)
    if cycle := find_cycle(preds):
        path = " -> ".join(map(str, cycle))
        raise GraphError(f"The graph has a cycle, so it has no pipeline order: nodes {path}")
