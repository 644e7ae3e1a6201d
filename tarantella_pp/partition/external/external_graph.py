"""Layer graphs of any origin as JSON: read, checked, and made a partition problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from tarantella_pp.errors import ConfigurationError, GraphError
from tarantella_pp.partition.graph.json_record import decoded
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

Cost = Annotated[float, msgspec.Meta(ge=0, le=1e200)]
"""A number that is finite and not negative, and whose sums are."""
Index = Annotated[int, msgspec.Meta(ge=0)]


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node as a graph file has it."""

    id: Index
    time: Cost
    memory: Cost
    flops: Cost = 0.0
    name: str | msgspec.UnsetType = msgspec.UNSET
    members: Any = None
    time_cpu: Cost = 0.0
    fw_time: Cost = 0.0
    bw_time: Cost = 0.0
    params: Cost = 0.0
    activation: Cost = 0.0


class EdgeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edge as a graph file has it."""

    src: Index
    dst: Index
    comm: Cost = 0.0
    bytes: Cost = 0.0
    tensor: Index | None = None


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as a graph file has it."""

    id: Index
    nodes: tuple[Index, ...]
    comm: Cost
    src: Index | None = None
    bytes: Cost = 0.0
    kind: Any = None


class GraphRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph file."""

    nodes: tuple[NodeRecord, ...]
    edges: tuple[EdgeRecord, ...]
    tensors: tuple[TensorRecord, ...] | None = None
    name: str = "graph"
    units: dict[str, str] = {}
    family: Any = None
    mode: Any = None
    meta: Any = None


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
    """Reads an external graph from a JSON file."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise GraphError(f"The graph {path} cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_BYTES:
        raise GraphError(f"{path} is larger than a graph may be ({MAX_BYTES} bytes).")
    try:
        return loads_graph(text)
    except GraphError as error:
        raise GraphError(f"{path} is no valid external graph: {error}") from error


def loads_graph(text: str | bytes) -> ExternalGraph:
    """Reads an external graph from JSON text."""
    try:
        record = decoded(text, GraphRecord)
    except ValueError as error:
        raise GraphError(str(error)) from None
    for problem in _problems(record):
        raise GraphError(problem)
    nodes = tuple(
        ExternalNode(f"node{node.id}" if node.name is msgspec.UNSET else node.name,
                     node.time, node.memory, node.flops)
        for node in record.nodes
    )  # fmt: skip
    edges = tuple((edge.src, edge.dst) for edge in record.edges)
    if record.tensors is None:  # one tensor for each edge
        tensors = tuple(TensorCost(e.src, (e.src, e.dst), e.comm, e.bytes) for e in record.edges)
    else:
        tensors = tuple(TensorCost(t.src, t.nodes, t.comm, t.bytes) for t in record.tensors)
    return ExternalGraph(record.name, nodes, edges, tensors, record.units)


def to_problem(
    graph: ExternalGraph,
    num_stages: int,
    objective: Objective,
    *,
    memory_limit: float | Sequence[float] | None = None,
    exactly: bool = False,
) -> Problem:
    """Makes the partition problem of an external graph; memory and time count as given."""
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


def _problems(graph: GraphRecord) -> Iterator[str]:
    """Finds what in a graph file does not fit together."""
    count = len(graph.nodes)
    if not count:
        yield "A graph has at least one node. Received: nodes=[]"
    ids = [("nodes", place, node.id) for place, node in enumerate(graph.nodes)]
    ids += [("tensors", place, tensor.id) for place, tensor in enumerate(graph.tensors or ())]
    for kind, place, number in ids:
        if number != place:
            yield f"{kind}[{place}].id: ids count 0, 1, 2 ... in order. Received: {number}"
    for place, edge in enumerate(graph.edges):
        ends = {"src": edge.src, "dst": edge.dst}
        yield from _beyond(f"edges[{place}]", ends, count)
        if edge.src == edge.dst:
            yield f"edges[{place}] leads from node {edge.src} to itself."
        if graph.tensors is not None and edge.tensor is not None:
            yield from _beyond(f"edges[{place}]", {"tensor": edge.tensor}, len(graph.tensors))
    for place, tensor in enumerate(graph.tensors or ()):
        nodes = tensor.nodes
        for node in nodes:
            yield from _beyond(f"tensors[{place}]", {"nodes": node}, count)
        if tensor.src is not None and tensor.src not in nodes:
            yield f"tensors[{place}].nodes lacks its own src={tensor.src}. Received: {list(nodes)}"
        if not nodes or len(set(nodes)) < len(nodes):
            yield f"tensors[{place}].nodes names each node once. Received: {list(nodes)}"
    preds, _ = adjacency(count, [(edge.src, edge.dst) for edge in graph.edges])
    if cycle := find_cycle(preds):
        path = " -> ".join(map(str, cycle))
        yield f"The graph has a cycle, so it has no pipeline order: nodes {path}"


def _beyond(where: str, numbers: dict[str, int], count: int) -> Iterator[str]:
    for name, number in numbers.items():
        if number >= count:
            yield f"{where}.{name} is one of 0..{count - 1}. Received: {number}"
