"""A pool of ideals worth a boundary: least cuts around a plan, recombined exactly."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.exact.chain_dp import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import Words, pack
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily
from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray
from tarantella_pp.partition.solvers.wide.min_cut import least_cut
from tarantella_pp.partition.solvers.wide.neighbourhood import ends_first_and_last
from tarantella_pp.partition.solvers.wide.stage_windows import Closure

#: Ideals kept in the pool.
MAX_POOL = 6000


class IdealPool:
    """Ideals of small cut, gathered around targets of work and around plans."""

    def __init__(self, instance: Instance, closure: Closure) -> None:
        self._instance = instance
        self._closure = closure
        resource = instance.objective
        self._work: FloatArray = resource.fixed + resource.factor[0] * resource.held
        self._total = float(self._work.sum())
        n = instance.num_nodes
        self._words: Words = pack(np.array([[False, True]] * n))
        self._grid: Words = self._words

    def __len__(self) -> int:
        """Returns the number of ideals."""
        return int(self._words.shape[1])

    def add(self, members: list[NDArray[np.bool_]]) -> None:
        """Adds ideals, each a membership of shape `(nodes,)`."""
        if members:
            words = pack(np.stack(members, axis=1))
            self._words = np.unique(np.concatenate([self._words, words], axis=1), axis=1)

    def add_grid(self, targets: int, deadline: float) -> None:
        """Adds the least cut near each of several amounts of work before it."""
        zero = np.zeros(self._instance.num_nodes)
        touch = self._instance.objective.terms.touch
        ideals = []
        for part in range(1, targets):
            target = self._total * part / targets
            for width in (0.5, 2.0):
                if time.thread_time() > deadline:
                    break
                slack = self._total * width / targets
                inside = self._total - self._closure.after < target - slack
                outside = self._closure.before > target + slack
                ideals.append(least_cut(self._instance, touch, inside, outside, zero)[1])
        self.add(ideals)
        self._grid = self._words

    def forget(self) -> None:
        """Drops what was added since the last grid."""
        self._words = self._grid

    def add_around(
        self, stages: IntArray, random: np.random.Generator, draws: int, deadline: float
    ) -> None:
        """Adds least cuts between the boundaries next to each boundary of a plan."""
        S = self._instance.num_stages
        touch = self._instance.objective.terms.touch
        ideals = []
        for boundary in range(1, S):
            ideals.append(stages < boundary)
            inside, outside = stages < boundary - 1, stages > boundary
            for _ in range(draws):
                if time.thread_time() > deadline:
                    break
                price = random.uniform(-1, 1) ** 3 * self._work
                noise = touch * random.uniform(0.8, 1.2, len(touch))
                ideals.append(least_cut(self._instance, noise, inside, outside, price)[1])
        self.add(ideals)

    def cross(self, stages: IntArray, random: np.random.Generator, draws: int) -> None:
        """Adds unions and intersections of the plan's boundaries with ideals of the pool."""
        for boundary in range(1, self._instance.num_stages):
            ours = pack((stages < boundary)[:, None])
            others = self._words[:, random.integers(0, len(self), draws)]
            more = np.concatenate([self._words, ours | others, ours & others], axis=1)
            self._words = np.unique(more, axis=1)

    def recombine(self, value: float, deadline: float) -> IntArray | None:
        """Looks for the best plan whose boundaries all lie in the pool."""
        family = ends_first_and_last(
            IdealFamily(self._instance, self._words), self._instance.num_nodes
        )
        if len(family) > MAX_POOL:
            family = self._thinned(family)
        try:
            chain = ChainSearch(family).run(value * (1 - 1e-9), deadline)
        except OutOfTimeError:
            return None
        return None if chain is None else chain[1]

    def _thinned(self, family: IdealFamily) -> IdealFamily:
        """Keeps the ideals that cut least, from each amount of work evenly many."""
        sums = family.sums[0]
        slices = (sums.fixed / max(self._total, 1e-300) * 200).astype(np.int64)
        order = np.lexsort((sums.touch, slices))
        starts = np.searchsorted(slices[order], slices[order])
        rank = np.arange(len(order)) - starts
        kept = order[np.argsort(rank, kind="stable")[: MAX_POOL - 2]]
        rows = np.unique(np.concatenate([[0], kept, [len(family) - 1]]))
        thin = family.take(rows)
        self._words = thin.words
        return thin
