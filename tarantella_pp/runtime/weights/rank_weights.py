"""The weights of one rank, and one table of a model's variables: who has and trains each.

The table comes from the plan, the same on all ranks. Two stages on a rank each, two replicas,
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tarantella_pp.internals.parted import in_parts, keys_of
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.gradient_buckets import gradient_buckets, weight_replicas
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.comm.tensor_buffers import variable_dtype
from tarantella_pp.runtime.weights.gradient_reduction import GradientReduction
from tarantella_pp.runtime.weights.remote_variables import (
    StepCounter,
    initialize_deferred,
    is_stale,
    keep_in_parts,
    keep_memory,
    make_remote,
)
from tarantella_pp.runtime.weights.shared_weights import (
    Array,
    Copies,
    TiedWeights,
    ValueStream,
    broadcast_variable,
    check_alike,
)


@dataclass(frozen=True)
class PlacedModel:
    """A model with its plan, and the ranks that run it."""

    extracted: ExtractedModel
    plan: Plan
    groups: ProcessGroups

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of a pipeline that has each stage."""
        return self.plan.schedule_spec(self.groups.pipeline.size).placement

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, of all replicas."""
        return self.plan.num_micro_batches * self.plan.num_replicas

    @property
    def own_micro_batches(self) -> int:
        """Those that a replica runs; one process runs all, one after the other."""
        return self.num_micro_batches // self.groups.num_replicas


@dataclass(frozen=True, slots=True)
class VariableRow:
    """What all ranks know of a variable."""

    # The Keras variable; ranks know it by its place in the table, for Keras counts layers in each
    # process, so that names differ
    variable: Any
    trainable: bool
    ranks: tuple[int, ...]  # the ranks of a pipeline whose stages use it, the first stage's first
    replica: int  # the replica that updates it, if they share out the optimizer
    trainer: int  # the rank that trains it and has its optimizer state, among `VariableTable.ranks`

    @property
    def owner(self) -> int:
        """The rank of a pipeline that has the true value."""
        return self.ranks[0] if self.ranks else 0


@dataclass(frozen=True)
class VariableTable:
    """All variables of a model, in the order in which it has them."""

    rows: tuple[VariableRow, ...]
    # The ranks that share out the optimizer: usually the pipeline's, for every replica updates
    # all of its weights; with a sharded optimizer (ZeRO-1) all of the job
    ranks: Communicator
    # Whether this rank has what it trains alone, or is of the replica that speaks for all
    speaks: bool

    @classmethod
    def of(cls, placed: PlacedModel, others: Iterable[Any] = ()) -> VariableTable:
        """Makes the table of what the stages of a plan use, and of other variables."""
        extracted, groups = placed.extracted, placed.groups
        shares_out = placed.plan.shard_optimizer and groups.num_replicas > 1
        users = extracted.graph.users(placed.plan.assignment)
        ranks = [tuple(dict.fromkeys(placed.placement[s] for s in stages)) for stages in users]
        replicas = [0] * len(ranks)
        if shares_out:
            sizes = [math.prod(variable.shape) for variable in extracted.variables]
            # Each stage by itself, as plans count it; what no stage uses is apart.
            stages = [used[0] if used else -1 for used in users]
            replicas = weight_replicas(sizes, stages, groups.num_replicas)
        places = dict(
            zip(map(id, extracted.variables), zip(ranks, replicas, strict=True), strict=True)
        )
        rows = []
        for variable in {id(v): v for v in (*extracted.variables, *in_parts(others))}.values():
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


# A variable of another model.
_UNKNOWN = VariableRow(None, False, (), 0, 0)

# A stage, and the number of one of its buckets of gradients.
Bucket: TypeAlias = tuple[int, int]


class RankWeights:
    """What a rank has of a model's variables, and what it does for other ranks with them."""

    def __init__(
        self, placed: PlacedModel, others: Iterable[Any], before: RankWeights | None = None
    ) -> None:
        if before is not None:
            others = before.variables
        extracted, plan, groups = placed.extracted, placed.plan, placed.groups
        keep_in_parts(extracted.variables)
        self.table = table = VariableTable.of(placed, others)
        self.clock: StepCounter = StepCounter() if before is None else before.clock
        self.variables: tuple[Any, ...] = tuple(row.variable for row in table.rows)
        self.groups, self._pipeline, self._peers = groups, groups.pipeline, groups.peers
        self._rank = rank = groups.pipeline.rank
        self._keys = keys_of(self.variables)
        tied = [row for row in table.rows if row.trainable and len(row.ranks) > 1]
        self.ties = TiedWeights([(row.variable, row.ranks) for row in tied], groups.pipeline)
        self._used = {i for i, row in enumerate(table.rows) if rank in row.ranks}
        self.bucket_counts: list[int] = []  # of each stage; none for one replica
        self.buckets: dict[Bucket, list[Any]] = {}  # whose sums this rank takes part in
        if groups.num_replicas > 1:
            stages = gradient_buckets(
                extracted.graph, plan.assignment, plan.num_stages, plan.fusion_threshold
            )
            self.bucket_counts = [len(buckets) for buckets in stages]
            self.buckets = {
                (stage, number): [extracted.variables[i] for i in bucket]
                for stage, buckets in enumerate(stages)
                if placed.placement[stage] == rank
                for number, bucket in enumerate(buckets)
            }
        self._gradient_dtype = plan.gradient_dtype
        # Whether replicas update weights for each other (ZeRO-1).
        self.shares_out = plan.shard_optimizer and groups.num_replicas > 1
        updated: dict[int, list[Any]] = {}  # by the replica that does so
        for row in table.rows if self.shares_out else ():
            if row.trainable and row.owner == rank:
                updated.setdefault(row.replica, []).append(row.variable)
        mine = updated.pop(groups.replica, [])
        sent = dict.fromkeys(range(groups.num_replicas), mine)
        self._updated = Copies(groups.peers, sent, updated)

    def start_alike(self) -> None:
        """Gives every rank the first rank's values, or true ones; draws what has none."""
        for i, row in enumerate(self.table.rows):
            if i in self._used:
                keep_memory(row.variable)
            elif row.ranks:
                make_remote(row.variable, self.clock)
        # A weight without a value on every rank is drawn where it is used. Where any rank has one,
        # that one counts.
        everywhere = self._pipeline.allgather_json(self._stale())
        deferred = set(everywhere[0]).intersection(*everywhere[1:])
        for i in deferred & self._needed():
            initialize_deferred(self.variables[i])
        self._share(everywhere, set(range(len(self.variables))) - deferred, root=0)
        for i, variable in enumerate(self.variables):
            # Replicas have the same stages, so what none of them uses needs no value.
            if i not in deferred or i in self._used:
                broadcast_variable(variable, 0, self._peers)

    def gather(self) -> None:
        """Gives every rank the value of each variable from the rank that trains it."""
        self.check_written()
        stale = self._pipeline.allgather_json(self._stale())
        self._share(stale, range(len(self.variables)))
        self.clock.written.clear()

    def refresh(self) -> None:
        """Brings up to date what stages use and another pipeline has trained on another rank."""
        needed = [i for i in sorted(self._used) if is_stale(self.variables[i])]
        needed_by = self._pipeline.allgather_json(needed)
        if any(needed_by):
            stale = self._pipeline.allgather_json(self._stale())
            self._share(stale, set().union(*needed_by))

    def publish(self) -> None:
        """Gives other ranks values that have changed behind a step; all must call it."""
        self.clock.advance()
        self.spread()
        self.ties.copies.publish()
        self.ties.copies.refresh()

    def spread(self) -> None:
        """Gives all replicas the values that this one has updated for them, and takes theirs."""
        self._updated.publish()
        self._updated.refresh()

    def check_alike(self) -> None:
        """Refuses to go on if ranks have other values of a weight; all must call it.

        That is also one that another rank trains, and that this or another one has written.
        """
        clock, ranks, copied = self.clock, self.groups.world, self.groups.num_replicas > 1
        written = [i for i, weight in enumerate(self.variables) if id(weight) in clock.written]
        written = sorted(set().union(*ranks.allgather_json(written)))
        own = {i for i in self._needed() if copied or len(self.table.rows[i].ranks) != 1}
        check_alike(self.variables, ranks, own.union(written).difference(self._stale()))
        clock.written.clear()

    def check_written(self, told: Any = None) -> list[Any]:
        """As `check_alike` if any rank has written weights; returns what all ranks tell besides."""
        mine = [told, bool(self.clock.written)]
        texts, written = zip(*self.groups.world.allgather_json(mine), strict=True)
        if any(written):
            self.check_alike()
        return list(texts)

    def make_reduction(self) -> GradientReduction:
        """What adds up the gradients of this rank's buckets over the replicas."""
        owners = {
            key: [self.table[weight].replica for weight in bucket]
            for key, bucket in self.buckets.items()
        }
        shared_out = owners if self.shares_out else None
        return GradientReduction(self._peers, self.buckets, self._gradient_dtype, shared_out)

    def reader(self, stream: ValueStream) -> Callable[[Any], Array]:
        """Lets a rank read variables that it has not, one at a time; all ranks must call it."""
        self.refresh()
        numbers = {id(variable): i for i, variable in enumerate(self.variables)}
        read = stream.add(self.variables.__getitem__)

        def read_variable(variable: Any) -> Array:
            owner = self._pipeline.world_ranks[self.table[variable].owner]
            spec = TensorSpec(tuple(variable.shape), variable_dtype(variable))
            return read(owner, numbers[id(variable)], spec)

        return read_variable

    def owned(self) -> dict[str, Any]:
        """The variables that this rank tells of for all, by what files call them."""
        if self._peers.rank:
            return {}
        rows = zip(self._keys, self.table.rows, strict=True)
        return {key: row.variable for key, row in rows if row.owner == self._rank}

    def needed(self) -> dict[str, Any]:
        """The variables that this rank must have, by what files call them."""
        return {self._keys[i]: self.variables[i] for i in sorted(self._needed())}

    def _needed(self) -> set[int]:
        return {i for i, row in enumerate(self.table.rows) if i in self._used or not row.ranks}

    def _stale(self) -> list[int]:
        return [i for i, variable in enumerate(self.variables) if is_stale(variable)]

    def _share(
        self, stale: Sequence[Sequence[int]], which: Iterable[int], root: int | None = None
    ) -> None:
        """Gives all ranks the values of some variables, from the root or their owners."""
        if self._pipeline.size == 1:
            return
        for i in sorted(which):
            # The owner's value is stale where another pipeline of the script has trained it.
            true = [rank for rank, theirs in enumerate(stale) if i not in theirs]
            first = self.table.rows[i].owner if root is None else root
            broadcast_variable(
                self.variables[i], first if first in true else true[0], self._pipeline
            )
