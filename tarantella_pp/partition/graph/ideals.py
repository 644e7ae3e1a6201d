r"""What may come before a cut, the down-sets (ideals) of a layer graph, and what crosses cuts.

A set of operations can be the first stages of a pipeline if it has, with each operation, all that
come before it. Chains have one more of these sets than operations; branches multiply them::

         -> b --
        /       \           {}  {a}  {a b}  {a c}  {a b c}  {a b c d}
       a         -> d
        \       /           ab | cd  and  ac | bd  are cuts,  ad | bc  is none
         -> c --
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Tensor

if TYPE_CHECKING:
    import networkx as nx

# Sets up to which all of them are listed.
MOST_IDEALS = 4_000
Array = npt.NDArray[np.float64]
# Blocks that may come next.
Free = tuple[int, ...]


def summed(
    places: Sequence[int] | npt.NDArray[np.int64], weights: Sequence[float] | Array, size: int = 0
) -> Array:
    """Adds up weights by their places."""
    return np.bincount(places, weights, size).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of operations that a cut may separate, in a topological order.

    Operations that must share a stage are one block, with all that lies between them.
    """

    nodes: tuple[int, ...]  # the operations of each block, as bits
    before: tuple[int, ...]  # all operations that come directly before a block, as bits
    after: tuple[tuple[int, ...], ...]  # blocks that come directly after each block
    owner: npt.NDArray[np.int64]  # block of each operation
    graph: nx.DiGraph  # the blocks as a graph

    @classmethod
    def of(cls, graph: LayerGraph) -> Blocks:
        """Joins what must share a stage; who makes a tensor or trains a variable comes first."""
        trains: dict[int, int] = {}
        uses = ((weight, node.id) for node in graph.nodes for weight in node.weights)
        order = {(trains.setdefault(weight, node), node) for weight, node in uses}
        return cls.joined(len(graph.nodes), sorted(order.union(graph.edges)), graph.groups)

    @classmethod
    def joined(
        cls, count: int, edges: Iterable[tuple[int, int]], groups: Iterable[Iterable[int]] = ()
    ) -> Blocks:
        """Joins groups of operations of a graph with these edges."""
        import networkx as nx  # here, because reading a plan does not need it

        whole = nx.DiGraph()
        whole.add_nodes_from(range(count))
        whole.add_edges_from(edges)
        for group in groups:
            nx.add_cycle(whole, group)
        joined = nx.condensation(whole)
        members: dict[int, set[int]] = joined.nodes(data="members")
        order = [*nx.lexicographical_topological_sort(joined, key=lambda one: min(members[one]))]
        owner = np.empty(count, np.int64)
        for place, one in enumerate(order):
            owner[list(members[one])] = place
        dag = nx.relabel_nodes(joined, {one: place for place, one in enumerate(order)})
        nodes = [sum(1 << node for node in members[one]) for one in order]
        return cls(
            nodes=tuple(nodes),
            before=tuple(sum(nodes[p] for p in dag.predecessors(b)) for b in range(len(nodes))),
            after=tuple(tuple(sorted(dag.successors(b))) for b in range(len(nodes))),
            owner=owner,
            graph=dag,
        )

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def first(self) -> Free:
        """Blocks that nothing comes before."""
        return tuple(block for block, before in enumerate(self.before) if not before)

    def free_after(self, ideal: int, free: Free, block: int) -> Free:
        """Returns what may come next once a block is in a set, which it is already."""
        now = [one for one in self.after[block] if not self.before[one] & ~ideal]
        return (*(one for one in free if one != block), *now)

    @cached_property
    def segments(self) -> npt.NDArray[np.int64]:
        """Segment of each operation: a set with anything of one has all of those before.

        They part at blocks that all others come before or behind: what lies before them
        has no other end, what lies behind them no other beginning.
        """
        count = len(self)
        first = [min(after, default=count) for after in self.after]
        last = [-1] * count
        for block, after in enumerate(self.after):
            for one in after:
                last[one] = block
        ends = np.cumsum(1 - np.bincount(first, minlength=count + 1)[:count])
        begins = np.cumsum(1 - np.bincount([count - 1 - one for one in last])[:count])[::-1]
        alone = (ends == 1) & (begins == 1)
        numbers: npt.NDArray[np.int64] = (2 * np.cumsum(alone) - alone)[self.owner]
        return numbers

    @cached_property
    def ideals(self) -> Ideals | None:
        """All down-sets; `None` where they are too many to be listed."""
        level: dict[int, Free] = {0: self.first}
        found: dict[int, Free] = {}
        while level:
            found |= level
            if len(found) > MOST_IDEALS:
                return None
            larger: dict[int, Free] = {}
            for ideal, free in level.items():
                for block in free:
                    grown = ideal | self.nodes[block]
                    if grown not in larger:
                        larger[grown] = self.free_after(grown, free, block)
            level = larger
        return Ideals.of(self, found)

    def along(self, orders: Iterable[Sequence[int]]) -> Ideals:
        """Returns the down-sets that some orders of the blocks go through."""
        found: dict[int, Free] = {0: self.first}
        for order in orders:
            ideal, free = 0, self.first
            for block in order:
                ideal |= self.nodes[block]
                free = self.free_after(ideal, free, block)
                found[ideal] = free
        return Ideals.of(self, found)


@dataclass(frozen=True, eq=False)
class Ideals:
    """A family of down-sets, the smallest first: none of the operations, ..., all of them."""

    blocks: Blocks  # what they are sets of
    sets: Sequence[int]  # the sets, as bits of the operations
    free: Sequence[Free]  # blocks that may come next behind each

    @classmethod
    def of(cls, blocks: Blocks, found: dict[int, Free]) -> Ideals:
        """Sorts down-sets."""
        sets = sorted(found, key=lambda one: (one.bit_count(), one))
        return cls(blocks, sets, [found[one] for one in sets])

    def __len__(self) -> int:
        return len(self.sets)

    @cached_property
    def before(self) -> npt.NDArray[np.bool_]:
        """Which operations each set has, shape `(sets, operations)`."""
        count = len(self.blocks.owner)
        size = -(-count // 8)
        text = b"".join(one.to_bytes(size, "little") for one in self.sets)
        packed = np.frombuffer(text, np.uint8).reshape(len(self.sets), size)
        return np.unpackbits(packed, axis=1, count=count, bitorder="little").astype(bool)

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """Whether the second of two sets has all of the first, and more."""
        _, one_of = np.unique(self.blocks.owner, return_index=True)
        has = np.ascontiguousarray(self.before[:, one_of].T)
        beyond = np.zeros((len(self), len(self)), bool)
        for row, free in zip(beyond, self.free, strict=True):
            for block in free:
                row |= has[block]
        np.fill_diagonal(beyond, val=True)
        return np.ascontiguousarray(~beyond.T)

    def sums(self, weights: Array) -> Array:
        """Adds up weights of operations over each set."""
        return self.before @ weights

    def assignment(self, path: Sequence[int]) -> tuple[int, ...]:
        """Returns the stage of each operation, for the sets before stages 0, 1, ... and the end."""
        return tuple((len(path) - 1 - self.before[list(path[1:])].sum(axis=0)).tolist())


def crossings(
    graph: LayerGraph, assignment: Sequence[int]
) -> list[tuple[Tensor, int, tuple[int, ...]]]:
    r"""Returns tensors that cross stages, in the order of the graph: who makes and who reads each.

    stage 0            stage 1            stage 2
    a ---- x ------->  b ---- y ------->  c          x crosses from 0 to 1 and 2, y from 1 to 2
           \----------------------------> c

    A tensor goes straight from the stage that makes it to each stage that reads it. Outputs of the
    model are read by the last stage, too, which computes the loss. Inputs of the model do not
    cross: each stage that needs one gets it with the data.
    """
    crossed = []
    for tensor, stages in zip(graph.tensors, readers(graph, assignment), strict=True):
        if tensor.producer is not None:
            source = assignment[tensor.producer]
            if targets := tuple(stage for stage in stages if stage != source):
                crossed.append((tensor, source, targets))
    return crossed


def readers(graph: LayerGraph, assignment: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the stages that read each tensor, ascending."""
    last, outputs = {max(assignment)}, set(graph.outputs)
    return [
        tuple(sorted({assignment[n] for n in t.consumers} | (last if t.id in outputs else set())))
        for t in graph.tensors
    ]
