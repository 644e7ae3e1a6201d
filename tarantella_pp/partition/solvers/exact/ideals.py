"""Down-sets (ideals) of a precedence graph: all of them, or a chosen family."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    INPUT,
    Instance,
    Resource,
)
from tarantella_pp.partition.solvers.problem.problem import FloatArray

Words = NDArray[np.uint64]
Preds = tuple[tuple[int, ...], ...]

#: Ideals up to which lattices are kept: problems of one graph differ in their costs alone.
SMALL = 4_000
#: Bytes that the bit sets of an enumeration may take.
MEMORY_LIMIT = 600_000_000


@dataclass(frozen=True, eq=False, slots=True)
class Lattice:
    """All ideals of an instance, and the steps between them.

    Attributes:
        words: Bit sets, shape `(words, ideals)`; the empty ideal first, the full one last.
        size: Number of nodes of each ideal.
        source: Ideal before each step, steps ordered by the ideal they lead to.
        target: Ideal after each step.
        node: Node that the step adds.
    """

    words: Words
    size: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    node: NDArray[np.int32]

    @property
    def count(self) -> int:
        """Number of ideals."""
        return int(self.words.shape[1])


def enumerate_ideals(instance: Instance, limit: int, *, steps: bool = False) -> Lattice | None:
    """Lists every ideal, without ever meeting one twice.

    Nodes are inserted in topological order: the ideals of the first v + 1 nodes are those of the
    first v, and those of them that hold all predecessors of v, with v. Each round is a handful
    of array operations, and each ideal is written once.
    """
    return ideals_of(instance.preds, limit, steps=steps)


def ideals_of(preds: Preds, limit: int, *, steps: bool = False) -> Lattice | None:
    """Lists every ideal of a graph of which nothing but the order matters."""
    small = _small(preds, steps)
    if small is not None:
        return small if small.count <= limit else None
    return None if limit <= SMALL else _listed(preds, limit, steps)


@functools.lru_cache(maxsize=4)
def _small(preds: Preds, steps: bool) -> Lattice | None:
    return _listed(preds, SMALL, steps)


def _listed(preds: Preds, limit: int, steps: bool) -> Lattice | None:
    n, width = len(preds), max(1, (len(preds) + 63) // 64)
    limit = min(limit, MEMORY_LIMIT // (8 * width))
    words = np.zeros((width, 1024), np.uint64)
    size = np.zeros(1, np.int32)
    count = 1
    walk = _Steps() if steps else None
    for node in range(n):
        holds = np.ones(count, bool)
        for word, mask in _masks(preds[node]):
            holds &= (words[word, :count] & mask) == mask
        grown = np.flatnonzero(holds)
        total = count + len(grown)
        if total > limit:
            return None
        if total > words.shape[1]:
            words = np.concatenate([words, np.zeros((width, total), np.uint64)], axis=1)
        words[:, count:total] = words[:, grown]
        size = np.concatenate([size, size[grown] + 1])
        words[node >> 6, count:total] |= np.uint64(1 << (node & 63))
        if walk is not None:
            walk.insert(node, grown, count)
        count = total
    empty = np.zeros(0, np.int32)
    source, target, added = walk.arrays() if walk is not None else (empty, empty, empty)
    return Lattice(words[:, :count], size, source, target, added)


class _Steps:
    """The covering steps of a growing lattice, ordered by the ideal they lead to."""

    def __init__(self) -> None:
        self._source, self._target, self._node = (_Growing() for _ in range(3))
        self._start = _Growing()
        self._start.append(np.zeros(2, np.int32))

    def insert(self, node: int, grown: NDArray[np.intp], count: int) -> None:
        """Adds the steps of the ideals `grown + node`, numbered from `count` on."""
        number = np.full(count, -1, np.int32)
        number[grown] = np.arange(count, count + len(grown), dtype=np.int32)
        starts = self._start.view()
        first, sizes = starts[grown], starts[grown + 1] - starts[grown]
        where = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
        where = where + np.arange(len(where)) if len(where) else where.astype(np.int64)
        # A step K - u -> K is one of K + v too, unless v needs u: then K - u lacks it.
        source = number[self._source.view()[where]]
        owner = np.repeat(number[grown], sizes)
        kept = source >= 0
        source, owner, nodes = source[kept], owner[kept], self._node.view()[where][kept]
        sizes = np.bincount(owner - count, minlength=len(grown)) + 1
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        direct = np.zeros(total, bool)
        direct[ends - 1] = True
        self._source.append(_weave(direct, grown, source))
        self._target.append(_weave(direct, number[grown], owner))
        self._node.append(_weave(direct, np.full(len(grown), node), nodes))
        self._start.append((ends + starts[-1]).astype(np.int32))

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Returns source ideal, target ideal and node of every step."""
        return self._source.view(), self._target.view(), self._node.view()


def _weave(
    direct: NDArray[np.bool_], ours: NDArray[np.integer], inherited: NDArray[np.integer]
) -> NDArray[np.int32]:
    out = np.empty(len(direct), np.int32)
    out[direct] = ours
    out[~direct] = inherited
    return out


class _Growing:
    """An int32 array that grows at its end in amortised constant time."""

    def __init__(self) -> None:
        self._data = np.zeros(1024, np.int32)
        self._size = 0

    def append(self, values: NDArray[np.int32]) -> None:
        """Adds values at the end."""
        size = self._size + len(values)
        if size > len(self._data):
            data = np.zeros(2 * size, np.int32)
            data[: self._size] = self._data[: self._size]
            self._data = data
        self._data[self._size : size] = values
        self._size = size

    def view(self) -> NDArray[np.int32]:
        """Returns what has been added so far."""
        return self._data[: self._size]


def _masks(nodes: Sequence[int]) -> list[tuple[int, np.uint64]]:
    masks: dict[int, int] = {}
    for node in nodes:
        masks[node >> 6] = masks.get(node >> 6, 0) | 1 << (node & 63)
    return [(word, np.uint64(mask)) for word, mask in masks.items()]


def pack(member: NDArray[np.bool_]) -> Words:
    """Packs membership tables, shape `(nodes, ideals)`, into words, shape `(words, ideals)`."""
    n, count = member.shape
    width = max(1, (n + 63) // 64)
    padded = np.zeros((64 * width, count), bool)
    padded[:n] = member
    packed = np.ascontiguousarray(np.packbits(padded.T, axis=1, bitorder="little"))
    return np.ascontiguousarray(packed.view(np.uint64).T)


def unpack(words: Words, num_nodes: int) -> NDArray[np.uint8]:
    """Unpacks words into membership tables of 0 and 1, shape `(nodes, ideals)`."""
    member = np.empty((num_nodes, words.shape[1]), np.uint8)
    bits = np.arange(64, dtype=np.uint64)[:, None]
    for word, first in enumerate(range(0, num_nodes, 64)):
        part = member[first : first + 64]
        np.right_shift(words[word], bits[: len(part)], out=part, casting="unsafe")
    member &= 1
    return member


@dataclass(frozen=True, eq=False, slots=True)
class Sums:
    """What the ideals of a family hold and cut, in one resource; each of shape `(ideals,)`.

    Attributes:
        fixed: Sum of the nodes' `fixed` over the ideal.
        held: Sum of the nodes' `held` over the ideal.
        touch: Touch cost of the tensors with pins on both sides.
        receive: Receive cost of the tensors made inside and used outside.
        receive_held: The same per micro-batch in flight.
    """

    fixed: FloatArray
    held: FloatArray
    touch: FloatArray
    receive: FloatArray
    receive_held: FloatArray


def resource_sums(resource: Resource, member: NDArray[np.uint8]) -> Sums:
    """Sums a resource over each ideal of a family."""
    count = member.shape[1]
    fixed, held = _weighted(resource.fixed, member), _weighted(resource.held, member)
    touch, receive, receive_held = np.zeros(count), np.zeros(count), np.zeros(count)
    terms = resource.terms
    for t, pins in enumerate(terms.pins):
        rows = member[list(pins)]
        pair = len(pins) == 2
        cut = rows[0] ^ rows[1] if pair else rows.max(axis=0) ^ rows.min(axis=0)
        if terms.touch[t]:
            touch += terms.touch[t] * cut
        if terms.producer[t] != INPUT:
            live = cut if terms.producer[t] == ANY else cut & member[terms.producer[t]]
            receive += terms.receive[t] * live
            receive_held += terms.receive_held[t] * live
    return Sums(fixed, held, touch, receive, receive_held)


def _weighted(weights: FloatArray, member: NDArray[np.uint8]) -> FloatArray:
    total = np.zeros(member.shape[1])
    for node in np.flatnonzero(weights):
        total += weights[node] * member[node]
    return total
