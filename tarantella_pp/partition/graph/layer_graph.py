"""The layer graph: the operations of a model, the tensors between them and what each costs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property
from typing import Literal

import msgspec

from tarantella_pp.partition.graph.least_kept import Operation, least_kept

# Where a figure comes from: the traced graph, a guess, or a measurement.
Source = Literal["analytic", "estimated", "measured"]
# Kinds of operations whose gradients are some rows of their weights.
LOOKUPS = frozenset({"Embedding"})


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One variable of the model; several nodes may use it."""

    id: int  # position in `LayerGraph.weights`
    name: str  # path of the variable, e.g. `"dense/kernel"`; for messages only
    shape: tuple[int, ...]  # shape of the variable
    dtype: str  # dtype of the variable, e.g. `"float32"`
    trainable: bool  # whether it gets a gradient and optimizer state
    bytes: int  # size of its value in bytes
    # Whether the nodes that use it change it when they run: statistics, seeds
    stateful: bool = False


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of one operation."""

    id: int  # position in `LayerGraph.nodes`, which is a topological order
    name: str  # unique name: path through nested models, `":1"` for a second call
    kind: str  # class name of the operation, e.g. `"Dense"`
    inputs: tuple[int, ...] = ()  # ids of the tensors it reads, each once
    # Ids of the tensors it makes, in the order of its flattened result
    outputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()  # ids of the variables it uses
    # Bytes of its trainable variables (shared ones count in each of their nodes)
    parameters: int = 0
    flops: float = 0.0  # floating point operations of the forward pass, per sample
    # Whether `flops` were counted or are a guess
    flops_source: Source = "estimated"
    # Ids of those inputs and outputs that its backward pass needs again
    keeps: tuple[int, ...] = ()
    # Bytes per sample kept for its backward pass that are no tensor of the graph
    residual_bytes: float = 0.0
    residual_source: Source = "estimated"  # where `keeps` and `residual_bytes` come from
    # What it is made of, for one sample, and which of the values its backward pass reads; tensors
    # are called by their ids. Nothing where nobody saw it
    operations: tuple[Operation, ...] = ()
    needed: tuple[Hashable, ...] = ()
    # Share of its forward pass that its backward pass repeats; see `LayerGraph.keeping`
    repeated: float = 0.0


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that one node makes, or the model is given, and nodes read."""

    id: int  # position in `LayerGraph.tensors`
    name: str  # name of its producer, with `"[i]"` where that makes several
    shape: tuple[int | None, ...]  # shape with the batch first; `None` where it is not fixed
    dtype: str  # dtype, e.g. `"float32"`
    producer: int | None = None  # id of the node that makes it; `None` for an input of the model
    consumers: tuple[int, ...] = ()  # ids of the nodes that read it, ascending
    bytes_per_sample: int = 0  # size of one sample of it
    # Whether the backward pass sends a gradient over it: it is floating point and some trainable
    # variable is upstream
    has_gradient: bool = False
    # Shape of the Keras mask that travels with the value; `None` without one
    mask_shape: tuple[int | None, ...] | None = None
    # Id of the tensor whose memory it shares, e.g. the one it is a reshape of
    alias_of: int | None = None
    # How many rows each sample adds: more than 1 where samples are merged with windows or frames,
    # 0 for a table or a scalar; `None` where it cannot be told
    rows_per_sample: int | None = 1
    # Dimension that its samples are along; `None` for a table or a scalar
    sample_axis: int | None = 0


class LayerGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A model as an acyclic graph of operations; pure data."""

    # All operations, in a topological order. Inputs of the model are no nodes
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]  # all tensors between them, inputs of the model first
    inputs: tuple[int, ...]  # ids of the model's inputs, in its order
    outputs: tuple[int, ...]  # ids of the model's outputs, in its order; an id may occur twice
    weights: tuple[Weight, ...] = ()  # all variables of all nodes, each once
    # Size that unknown dimensions other than the batch were counted with; `None` where there are
    # none
    assumed_size: int | None = None

    @cached_property
    def groups(self) -> tuple[frozenset[int], ...]:
        """Sets of nodes that must share a stage, for they share a variable that they change."""
        import networkx as nx  # here, because showing a plan does not need it

        sharing = nx.Graph()
        for node in self.nodes:
            states = [w for w in node.weights if self.weights[w].stateful]
            sharing.add_edges_from((("weight", w), node.id) for w in states)
        parts = nx.connected_components(sharing)
        candidates = (frozenset(n for n in part if isinstance(n, int)) for part in parts)
        return tuple(sorted((g for g in candidates if len(g) > 1), key=min))

    @cached_property
    def ties(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Variables that several nodes may use on different stages, by the nodes that do."""
        users: dict[int, list[int]] = {}
        for node in self.nodes:
            for w in node.weights:
                if not self.weights[w].stateful:
                    users.setdefault(w, []).append(node.id)
        shared: dict[tuple[int, ...], list[int]] = {}
        for w, nodes in users.items():
            if len(nodes) > 1 and not any(group.issuperset(nodes) for group in self.groups):
                shared.setdefault(tuple(nodes), []).append(w)
        return {nodes: tuple(weights) for nodes, weights in shared.items()}

    @cached_property
    def keeping(self) -> Callable[[tuple[float, ...]], LayerGraph]:
        """Gives the graph where each node keeps the least, at its price; see `least_kept`."""
        return cache(self._with_least)

    def _with_least(self, prices: Sequence[float]) -> LayerGraph:
        operations, owners, needed = self._operations
        found = least_kept(operations, needed, [prices[owner] for owner in owners])
        inside, again, every = ([0.0] * len(self.nodes) for _ in range(3))
        for place, (one, owner) in enumerate(zip(operations, owners, strict=True)):
            for value, size in one.makes:
                inside[owner] += size * (value in found.values and isinstance(value, tuple))
            flops = one.flops if one.flops < math.inf else 0.0
            every[owner] += flops
            again[owner] += flops * (place in found.again)

        def least(node: Node) -> Node:
            around = map(self.storage, (*node.inputs, *node.outputs))
            return msgspec.structs.replace(
                node,
                keeps=tuple(dict.fromkeys(t for t in around if t in found.values)),
                residual_bytes=inside[node.id],
                repeated=again[node.id] / every[node.id] if every[node.id] else 0.0,
            )

        return msgspec.structs.replace(self, nodes=tuple(map(least, self.nodes)))

    @cached_property
    def _operations(self) -> tuple[list[Operation], list[int], list[Hashable]]:
        """All operations, the nodes that they are of, and what the backward pass needs."""
        operations: list[Operation] = []
        owners: list[int] = []
        needed: list[Hashable] = []
        made: set[Hashable] = set()

        def add(node: Node, *new: Operation) -> None:
            operations.extend(new)
            owners.extend([node.id] * len(new))
            made.update(value for one in new for value, _ in one.makes)

        def value(node: Node, name: Hashable) -> Hashable:
            return self.storage(name) if isinstance(name, int) else (node.id, name)

        for node in self.nodes:
            reads = dict.fromkeys(map(self.storage, node.inputs))
            for tensor in reads:  # inputs of the model
                if tensor not in made:
                    add(node, Operation((), ((tensor, self._bytes(tensor)),)))
            for one in node.operations:
                makes = tuple((value(node, name), size) for name, size in one.makes)
                named = tuple(value(node, name) for name in one.reads)
                add(node, one._replace(reads=named, makes=makes))
            rest = dict.fromkeys(map(self.storage, node.outputs))
            makes = tuple((t, self._bytes(t)) for t in rest if t not in made)
            flops, wanted = 0.0, node.needed  # the rest comes as it is
            if not node.operations:
                wanted = node.keeps
            if not node.operations and (node.residual_bytes or not node.needed):  # nobody saw how
                makes = (*makes, ((node.id, "inside"), node.residual_bytes))
                flops, wanted = max(1.0, node.flops), (*wanted, "inside")
            if makes:
                add(node, Operation(tuple(reads), makes, flops, dear=flops > 0))
            needed += [value(node, name) for name in wanted]
        return operations, owners, needed

    def _bytes(self, tensor: int) -> float:
        return float(self.tensors[tensor].bytes_per_sample)

    @cached_property
    def unsized(self) -> frozenset[str]:
        """Names of tensors whose shapes have to be sent with each micro-batch, too."""
        return frozenset(
            tensor.name
            for tensor in self.tensors
            if tensor.rows_per_sample != 1
            or None in tensor.shape[1:]
            or (tensor.mask_shape is not None and tensor.mask_shape != tensor.shape[:2])
        )

    @cached_property
    def tables(self) -> frozenset[int]:
        """Variables that some operation reads rows of."""
        return frozenset(w for node in self.nodes if node.kind in LOOKUPS for w in node.weights)

    @cached_property
    def looked_up(self) -> frozenset[int]:
        """Variables that are read by rows only, so that their gradients are sparse."""
        others = (node.weights for node in self.nodes if node.kind not in LOOKUPS)
        return self.tables.difference(*others)

    def users(self, assignment: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the stages that use each variable, ascending: the first one trains it."""
        stages: list[set[int]] = [set() for _ in self.weights]
        for node in self.nodes:
            for w in node.weights:
                stages[w].add(assignment[node.id])
        return [tuple(sorted(found)) for found in stages]

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of nodes, maker first, between which tensors run."""
        made = ((t.producer, t.consumers) for t in self.tensors if t.producer is not None)
        return tuple(dict.fromkeys((maker, reader) for maker, all_ in made for reader in all_))

    def misplaced(self, assignment: Sequence[int]) -> str | None:
        """Says which operations cannot be on the stages that they are on, `None` if all can."""
        for group in self.groups:
            stages = {assignment[node]: self.nodes[node].name for node in sorted(group)}
            if len(stages) > 1:
                return (
                    f"{list(stages.values())} share statistics or seeds, which change whenever one "
                    f"of them runs, so they must be on one stage. They are on stages {list(stages)}"
                )
        for before, after in self.edges:
            if assignment[before] > assignment[after]:
                return (
                    f"'{self.nodes[after].name}' on stage {assignment[after]} needs "
                    f"'{self.nodes[before].name}' on the later stage {assignment[before]}"
                )
        return None

    def storage(self, tensor: int) -> int:
        """Returns the id of the tensor whose memory a tensor shares, or its own."""
        while (other := self.tensors[tensor].alias_of) is not None:
            tensor = other
        return tensor

    def fingerprint(self) -> str:
        """Hash of operations, shapes, dtypes, edges and shared variables, without names."""
        structure = {
            "nodes": [(n.kind, n.inputs, n.outputs, n.weights) for n in self.nodes],
            "tensors": [(t.shape, t.dtype) for t in self.tensors],
            "weights": [(w.shape, w.dtype) for w in self.weights],
            "inputs": self.inputs,
            "outputs": self.outputs,
        }
        text = json.dumps(structure, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
