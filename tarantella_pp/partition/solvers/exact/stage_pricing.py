"""A family of ideals with their sums, and the cost of the stage between two of them."""

from __future__ import annotations

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
from tarantella_pp.partition.solvers.problem.problem import FloatArray

#: Ideals unpacked at a time while summing.
BLOCK = 1 << 15


class IdealFamily:
    """Some ideals of an instance, the empty and the full one among them or not.

    Args:
        instance: The graph and its resources.
        words: Bit sets of the ideals, shape `(words, ideals)`.
        sums: Sums of each resource over each ideal; None: computed here.
    """

    def __init__(
        self, instance: Instance, words: Words, sums: tuple[Sums, ...] | None = None
    ) -> None:
        self.instance = instance
        self.words = words
        self.sums = sums if sums is not None else _sums(instance, words)

    def __len__(self) -> int:
        """Returns the number of ideals."""
        return int(self.words.shape[1])

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
    """Prices stages that begin at one ideal and end at many.

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

    def stage(
        self,
        begin: IdealFamily,
        row: int,
        inside: NDArray[np.uint8],
        end: IdealFamily,
        rows: NDArray[np.intp],
        member: NDArray[np.uint8],
    ) -> tuple[FloatArray, FloatArray]:
        """Prices the stages from one ideal to each of several that contain it.

        Args:
            begin: Family of the first ideal.
            row: Its row.
            inside: Its membership, shape `(nodes,)`.
            end: Family of the last ideals.
            rows: Their rows.
            member: Membership of the whole `end` family, shape `(nodes, ideals)`.

        Returns:
            The fixed part and the part per micro-batch in flight, each of shape `(rows,)`.
        """
        at, to, terms = begin.sums[self.index], end.sums[self.index], self.resource.terms
        fixed = to.fixed[rows] - at.fixed[row] + (to.touch[rows] + at.touch[row])
        held = to.held[rows] - at.held[row]
        fixed += at.receive[row]
        held += at.receive_held[row]
        if not len(terms):
            return fixed, held
        # Which tensors are cut, and how many of their pins lie outside.
        absent = 1 - inside[self.flat].astype(np.int64)
        outside = np.add.reduceat(absent, self.starts)
        producer = terms.producer
        live = (producer == ANY) | ((producer != INPUT) & (inside[producer] > 0))
        cut = (outside > 0) & (outside < self.sizes)
        lone = np.flatnonzero(cut & (outside == 1))
        if len(lone):
            # One pin left: the tensor stays cut where that pin stays out, and is then missed.
            last = np.add.reduceat(absent * self.flat, self.starts)[lone]
            missing = 1.0 - member[last[:, None], rows[None, :]]
            fixed -= (2 * terms.touch[lone] + terms.receive[lone] * live[lone]) @ missing
            held -= (terms.receive_held[lone] * live[lone]) @ missing
        for t in np.flatnonzero(cut & (outside > 1)).tolist():
            rest = np.array([pin for pin in terms.pins[t] if not inside[pin]])
            more = member[rest[:, None], rows[None, :]].sum(axis=0, dtype=np.int64)
            both, missed = more < len(rest), more == 0
            if terms.touch[t]:
                fixed -= terms.touch[t] * both + terms.touch[t] * missed
            if live[t]:
                fixed -= terms.receive[t] * missed
                held -= terms.receive_held[t] * missed
        return fixed, held
