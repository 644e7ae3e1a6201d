"""A family of ideals with their sums, and the cost of the stage between two of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.ideals import (
    Sums,
    Words,
    resource_sums,
    unpack,
)
from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    INPUT,
    Instance,
    Resource,
)
from tarantella_pp.partition.solvers.problem.problem import FloatArray, weighted_counts

#: Ideals unpacked at a time while summing.
BLOCK = 1 << 15


class IdealFamily:
    """Some ideals of an instance, the empty and the full one among them or not."""

    def __init__(
        self, instance: Instance, words: Words, sums: tuple[Sums, ...] | None = None
    ) -> None:
        self.instance = instance
        self.words = words
        self.sums = sums if sums is not None else _sums(instance, words)

    def __len__(self) -> int:
        """Returns the number of ideals."""
        return int(self.words.shape[1])

    @functools.cached_property
    def member(self) -> NDArray[np.uint8]:
        """Membership of the ideals, shape `(nodes, ideals)`."""
        return unpack(self.words, self.instance.num_nodes)

    def take(self, rows: NDArray[np.intp]) -> IdealFamily:
        """Returns the family of some of the ideals."""
        sums = tuple(
            Sums(
                one.fixed[rows],
                one.held[rows],
                one.touch[rows],
                one.receive[rows],
                one.receive_held[rows],
            )
            for one in self.sums
        )
        return IdealFamily(self.instance, np.ascontiguousarray(self.words[:, rows]), sums)

    def window(self, boundary: int, caps: list[FloatArray]) -> NDArray[np.intp]:
        """Lists the ideals that can be the first `boundary` stages of a plan within the caps.

        The stages before the boundary hold the ideal's nodes and touch its open tensors at
        least once, and so do the stages after it with the rest; both sums are bounded.
        """
        keep = np.ones(len(self), bool)
        for resource, sums, cap in zip(self.instance.resources, self.sums, caps, strict=True):
            before, behind = slice(0, boundary), slice(boundary, len(cap))
            keep &= resource.fits(before, cap, sums.fixed + sums.touch, sums.held)
            left = resource.fixed.sum() - sums.fixed + sums.touch + sums.receive
            held = resource.held.sum() - sums.held + sums.receive_held
            keep &= resource.fits(behind, cap, left, held)
        return np.flatnonzero(keep)


def _sums(instance: Instance, words: Words) -> tuple[Sums, ...]:
    parts: list[list[Sums]] = [[] for _ in instance.resources]
    for begin in range(0, words.shape[1], BLOCK):
        member = unpack(words[:, begin : begin + BLOCK], instance.num_nodes)
        for part, resource in zip(parts, instance.resources, strict=True):
            part.append(resource_sums(resource, member))
    return tuple(
        Sums(
            *(
                np.concatenate([getattr(one, name) for one in part])
                for name in ("fixed", "held", "touch", "receive", "receive_held")
            )
        )
        for part in parts
    )


@dataclass(frozen=True, eq=False, slots=True)
class Pricer:
    """Prices the stages between pairs of ideals.

    With P the touch cost of the tensors an ideal cuts, the stage J - I pays P(I) + P(J), less
    what both count: a tensor cut by both is counted twice, and owed once where the stage touches
    it, not at all where it does not. Only tensors cut by I have to be looked at.
    """

    resource: Resource
    index: int
    flat: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, instance: Instance, index: int) -> Pricer:
        """Makes the pricer of one resource of an instance."""
        resource = instance.resources[index]
        flat, starts = resource.terms.flat()
        return cls(resource, index, flat, starts, np.diff(starts, append=len(flat)))

    def stages(
        self,
        begin: IdealFamily,
        at: NDArray[np.intp],
        end: IdealFamily,
        to: NDArray[np.intp],
    ) -> tuple[FloatArray, FloatArray]:
        """Prices the stages between pairs of ideals, of which the second contains the first."""
        first, last, terms = begin.sums[self.index], end.sums[self.index], self.resource.terms
        fixed = last.fixed[to] - first.fixed[at] + (last.touch[to] + first.touch[at])
        held = last.held[to] - first.held[at]
        fixed += first.receive[at]
        held += first.receive_held[at]
        if len(terms) and len(at):
            rows, pair_row = np.unique(at, return_inverse=True)
            both = self._counted_twice(begin.member[:, rows], pair_row, end.member, to)
            fixed -= both[0]
            held -= both[1]
        return fixed, held

    def _counted_twice(
        self,
        inside: NDArray[np.uint8],
        row: NDArray[np.intp],
        member: NDArray[np.uint8],
        to: NDArray[np.intp],
    ) -> tuple[FloatArray, FloatArray]:
        """Sums up what pairs of ideals count of tensors that are cut at both."""
        terms = self.resource.terms
        tensors, first_row, live = self._cut(inside)
        if not len(tensors):
            return np.zeros(len(row)), np.zeros(len(row))
        # A pair for each tensor that is cut at its first ideal ...
        at_row = np.searchsorted(first_row, np.arange(inside.shape[1] + 1))
        pair, one = numbers_in(at_row[row], at_row[row + 1])
        tensor = tensors[one]
        # ... and each of its pins: how many lie outside of that, and how many not of the last.
        which, pin = numbers_in(self.starts[tensor], self.starts[tensor] + self.sizes[tensor])
        pin = self.flat[pin]
        outside = 1 - inside[pin, row[pair[which]]]
        more = outside & member[pin, to[pair[which]]]
        begins = np.cumsum(self.sizes[tensor]) - self.sizes[tensor]
        left, met = (np.add.reduceat(n.astype(np.int64), begins) for n in (outside, more))
        missed = met == 0
        received = missed & live[one]
        fixed = terms.touch[tensor] * ((met < left).astype(float) + missed)
        fixed += terms.receive[tensor] * received
        held = terms.receive_held[tensor] * received
        return weighted_counts(pair, fixed, len(row)), weighted_counts(pair, held, len(row))

    def _cut(
        self, inside: NDArray[np.uint8]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Lists the tensors that ideals cut, by ideal, and whether their producer is inside."""
        some, every = inside.max(axis=1) > 0, inside.min(axis=1) > 0
        may = np.logical_or.reduceat(some[self.flat], self.starts)
        may &= ~np.logical_and.reduceat(every[self.flat], self.starts)
        candidates = np.flatnonzero(may)
        if not len(candidates):
            return candidates, candidates, may[:0]
        _, pins = numbers_in(
            self.starts[candidates], self.starts[candidates] + self.sizes[candidates]
        )
        sizes = self.sizes[candidates]
        within = np.add.reduceat(
            inside[self.flat[pins]].astype(np.int32), np.cumsum(sizes) - sizes, axis=0
        )
        row, chosen = np.nonzero(((within > 0) & (within < sizes[:, None])).T)
        tensor = candidates[chosen]
        producer = self.resource.terms.producer[tensor]
        live = (producer == ANY) | ((producer != INPUT) & (inside[producer, row] > 0))
        return tensor, row, live


def numbers_in(
    begin: NDArray[np.intp], end: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Lists the numbers of several ranges one after another."""
    sizes = end - begin
    which = np.repeat(np.arange(len(sizes)), sizes)
    before = np.cumsum(sizes) - sizes
    return which, np.arange(len(which)) + (begin - before)[which]
