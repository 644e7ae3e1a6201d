"""Layer graphs of any origin as JSON: read, checked, and made a partition problem."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tarantella_pp.errors import GraphError
from tarantella_pp.partition.digraph import adjacency, find_cycle
from tarantella_pp.partition.problem import Objective, Problem, TensorCost

#: Files larger than this are refused before they are read.
MAX_BYTES = 512 * 1024 * 1024
_NODE_COSTS = ("time", "memory", "flops", "time_cpu", "fw_time", "bw_time", "params", "activation")
_NODE_FIELDS = frozenset(["id", "name", "members", *_NODE_COSTS])
_EDGE_FIELDS = frozenset(["src", "dst", "comm", "bytes", "tensor"])
_TENSOR_FIELDS = frozenset(["id", "src", "nodes", "comm", "bytes", "kind"])
_TOP_FIELDS = frozenset(["name", "family", "mode", "units", "meta", "nodes", "edges", "tensors"])
_LARGEST = 1e200


@dataclass(frozen=True, slots=True)
class NeutralNode:
    """An operation of a neutral graph.

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
class NeutralGraph:
    """A layer graph without a framework.

    Attributes:
        name: Its name.
        nodes: The operations; their ids are their places in this tuple.
        edges: Precedence pairs (before, after).
        tensors: What travels between stages.
    """

    name: str
    nodes: tuple[NeutralNode, ...]
    edges: tuple[tuple[int, int], ...]
    tensors: tuple[TensorCost, ...]


def load_graph(path: str | Path) -> NeutralGraph:
    """Reads a neutral graph from a JSON file.

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


def loads_graph(text: str) -> NeutralGraph:
    """Reads a neutral graph from JSON text.

    Args:
        text: The JSON.

    Returns:
        The checked graph.

    Raises:
        GraphError: The text is not JSON or breaks a rule of the format.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except GraphError:
        raise
    except (ValueError, RecursionError) as error:
        raise GraphError(f"Not JSON: {str(error)[:200]}") from error
    return graph_from_dict(data)


def graph_from_dict(data: Any) -> NeutralGraph:
    """Checks a neutral graph that is already parsed.

    Args:
        data: The JSON object: `nodes` (id, time, memory ...), `edges` (src, dst, comm, bytes,
            tensor) and `tensors` (id, src, nodes, comm, bytes).

    Returns:
        The checked graph.

    Raises:
        GraphError: It breaks a rule of the format.
    """
    top = _record(data, "graph", _TOP_FIELDS, ("nodes", "edges"))
    nodes = _nodes(_list(top["nodes"], "nodes"))
    count = len(nodes)
    edges, loose = _edges(_list(top["edges"], "edges"), count)
    if "tensors" in top:
        tensors = _tensors(_list(top["tensors"], "tensors"), count)
        _check_references(loose, len(tensors))
    else:
        tensors = _tensors_of_edges(top["edges"])
    name = top.get("name", "graph")
    if not isinstance(name, str):
        raise GraphError(f"`name` is a string. Received: {_show(name)}")
    graph = NeutralGraph(name, nodes, edges, tensors)
    _check_acyclic(graph)
    return graph


def to_problem(
    graph: NeutralGraph,
    num_stages: int,
    objective: Objective,
    *,
    memory_limit: float | Sequence[float] | None = None,
    exactly: bool = False,
) -> Problem:
    """Makes the partition problem of a neutral graph; memory and time count as given.

    Args:
        graph: The graph.
        num_stages: Stages; at most that many are used.
        objective: What the largest stage is measured in.
        memory_limit: Bytes that a stage may hold, one number or one for each stage.
        exactly: Whether every stage must have a node.

    Returns:
        The problem.
    """
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


def _nodes(records: list[Any]) -> tuple[NeutralNode, ...]:
    if not records:
        raise GraphError("A graph has at least one node. Received: nodes=[]")
    nodes = []
    for place, record in enumerate(records):
        where = f"nodes[{place}]"
        node = _record(record, where, _NODE_FIELDS, ("id", "time", "memory"))
        if _index(node["id"], f"{where}.id", len(records)) != place:
            raise GraphError(
                f"{where}.id: node ids count 0, 1, 2 ... in order. Received: {_show(node['id'])}"
            )
        name = node.get("name", f"node{place}")
        if not isinstance(name, str):
            raise GraphError(f"{where}.name is a string. Received: {_show(name)}")
        costs = {key: _cost(node.get(key, 0.0), f"{where}.{key}") for key in _NODE_COSTS}
        nodes.append(NeutralNode(name, costs["time"], costs["memory"], costs["flops"]))
    return tuple(nodes)


def _edges(records: list[Any], count: int) -> tuple[tuple[tuple[int, int], ...], list[Any]]:
    """Returns the precedence pairs, and the tensor that each edge names."""
    edges, named = [], []
    for place, record in enumerate(records):
        where = f"edges[{place}]"
        edge = _record(record, where, _EDGE_FIELDS, ("src", "dst"))
        before = _index(edge["src"], f"{where}.src", count)
        after = _index(edge["dst"], f"{where}.dst", count)
        if before == after:
            raise GraphError(f"{where} leads from node {before} to itself.")
        for key in ("comm", "bytes"):
            _cost(edge.get(key, 0.0), f"{where}.{key}")
        edges.append((before, after))
        named.append((where, edge.get("tensor")))
    return tuple(edges), named


def _check_references(named: Iterable[tuple[str, Any]], count: int) -> None:
    for where, tensor in named:
        if tensor is not None:
            _index(tensor, f"{where}.tensor", count)


def _tensors(records: list[Any], count: int) -> tuple[TensorCost, ...]:
    tensors = []
    for place, record in enumerate(records):
        where = f"tensors[{place}]"
        tensor = _record(record, where, _TENSOR_FIELDS, ("id", "nodes", "comm"))
        if _index(tensor["id"], f"{where}.id", len(records)) != place:
            raise GraphError(f"{where}.id: tensor ids count 0, 1, 2 ... in order.")
        nodes = [
            _index(node, f"{where}.nodes", count)
            for node in _list(tensor["nodes"], f"{where}.nodes")
        ]
        source = tensor.get("src")
        if source is not None:
            source = _index(source, f"{where}.src", count)
            if source not in nodes:
                raise GraphError(f"{where}.nodes lacks its own src. Received: {_show(nodes)}")
        if not nodes or len(set(nodes)) < len(nodes):
            raise GraphError(f"{where}.nodes names each node once. Received: {_show(nodes)}")
        comm = _cost(tensor["comm"], f"{where}.comm")
        size = _cost(tensor.get("bytes", 0.0), f"{where}.bytes")
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


def _check_acyclic(graph: NeutralGraph) -> None:
    preds, _ = adjacency(len(graph.nodes), graph.edges)
    if cycle := find_cycle(preds):
        path = " -> ".join(map(str, cycle))
        raise GraphError(f"The graph has a cycle, so it has no pipeline order: nodes {path}")


def _record(value: Any, where: str, known: frozenset[str], needed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GraphError(f"{where} is a JSON object. Received: {_show(value)}")
    unknown = sorted(set(value) - known)
    if unknown:
        raise GraphError(
            f"{where} has an unknown field {unknown[0]!r}. Known: {', '.join(sorted(known))}"
        )
    for key in needed:
        if key not in value:
            raise GraphError(f"{where} lacks the field {key!r}.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{where} is a JSON array. Received: {_show(value)}")
    return value


def _index(value: Any, where: str, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise GraphError(f"{where} is a whole number in 0..{count - 1}. Received: {_show(value)}")
    return value


def _cost(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= _LARGEST or math.isnan(value):
        raise GraphError(f"{where} is a finite number, not negative. Received: {_show(value)}")
    return float(value)


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Whole numbers of thousands of digits have no decimal form.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _no_constant(name: str) -> float:
    raise GraphError(f"A cost is a finite number. Received: {name}")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise GraphError(f"A JSON object has the field {twice!r} twice.")
    return record
