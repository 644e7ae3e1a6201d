"""One table of a model's variables: which ranks have each, and which one trains it.

It is made from the plan, the same on all ranks. Two stages on a rank each, two replicas of them,
and an optimizer that the replicas share out (`world_ranks` are 0, 1 and 2, 3)::

    variable    trainable   ranks   replica   trainer
    table       yes         0, 1    0         0         tied: rank 1 hands its gradients to rank 0
    kernel      yes         1       1         3         replica 1 updates it, for both
    seed        no          0       0         0
    unused      yes                 0         0         no stage needs it: the same everywhere
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.partition.costs.optimizer_shards import weight_replicas
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.weights.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class VariableRow:
    """What all ranks know of a variable.

    Attributes:
        variable: The Keras variable; ranks know it by its place in the table, for Keras counts
            layers in each process, so that names differ.
        trainable: Whether it is trained.
        ranks: The ranks of a pipeline whose stages use it, the first stage's first.
        replica: The replica that updates it, if they share out the optimizer.
        trainer: The rank that trains it and has its optimizer state, among `VariableTable.ranks`.
    """

    variable: Any
    trainable: bool
    ranks: tuple[int, ...]
    replica: int
    trainer: int

    @property
    def owner(self) -> int:
        """The rank of a pipeline that has the true value."""
        return self.ranks[0] if self.ranks else 0


@dataclass(frozen=True)
class VariableTable:
    """All variables of a model, in the order in which it has them.

    Attributes:
        rows: The variables.
        ranks: The ranks that share out the optimizer: usually those of a pipeline, for every
            replica updates all of its weights; with a sharded optimizer (ZeRO-1) all of the job.
        speaks: Whether this rank has what it trains alone, or is of the replica that speaks for
            all.
    """

    rows: tuple[VariableRow, ...]
    ranks: Communicator
    speaks: bool

    @classmethod
    def of(
        cls,
        extracted: ExtractedModel,
        plan: Plan,
        placement: Sequence[int],
        groups: ProcessGroups,
        others: Iterable[Any] = (),
    ) -> VariableTable:
        """Makes the table of what the stages of a plan use, and of other variables."""
        shares_out = plan.shard_optimizer and groups.num_replicas > 1
        users = extracted.graph.users(plan.assignment)
        ranks = [tuple(dict.fromkeys(placement[s] for s in stages)) for stages in users]
        replicas = [0] * len(ranks)
        if shares_out:
            sizes = [math.prod(variable.shape) for variable in extracted.variables]
            owners = [own[0] if own else 0 for own in ranks]
            replicas = weight_replicas(sizes, owners, groups.num_replicas)
        places = dict(
            zip(map(id, extracted.variables), zip(ranks, replicas, strict=True), strict=True)
        )
        rows = []
        for variable in {id(v): v for v in (*extracted.variables, *others)}.values():
            own, replica = places.get(id(variable), ((), 0))
            owner = own[0] if own else 0
            trainer = groups.world_ranks[replica][owner] if shares_out else owner
            rows.append(VariableRow(variable, bool(variable.trainable), own, replica, trainer))
        ranks_of_optimizer = groups.world if shares_out else groups.pipeline
        return cls(tuple(rows), ranks_of_optimizer, shares_out or groups.replica == 0)

    def __getitem__(self, variable: Any) -> VariableRow:
        return self._by_id.get(id(variable), _UNKNOWN)

    @functools.cached_property
    def _by_id(self) -> dict[int, VariableRow]:
        return {id(row.variable): row for row in self.rows}

    def trains(self, variable: Any) -> bool:
        """Whether this rank updates a weight."""
        return self[variable].trainer == self.ranks.rank


_UNKNOWN = VariableRow(None, False, (), 0, 0)
"""A variable of another model."""
