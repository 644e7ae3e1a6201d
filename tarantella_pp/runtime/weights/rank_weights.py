"""The weights of one rank: brought together, handed to others, compared; loops over the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ReplicaError
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.gradient_buckets import gradient_buckets
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.collective import digest
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import (
    to_buffer,
    to_tensor,
    value_of,
    variable_dtype,
)
from tarantella_pp.runtime.weights.gradient_reduction import GradientReduction
from tarantella_pp.runtime.weights.process_groups import ProcessGroups
from tarantella_pp.runtime.weights.remote_variables import (
    StepCounter,
    initialize_deferred,
    is_stale,
    keep_memory,
    make_remote,
)
from tarantella_pp.runtime.weights.tied_weights import TiedWeights
from tarantella_pp.runtime.weights.value_stream import ValuePieces, ValueStream
from tarantella_pp.runtime.weights.variable_table import VariableTable

_VALUES_TAG = 17

Bucket: TypeAlias = tuple[int, int]
"""A stage, and the number of one of its buckets of gradients."""


class RankWeights:
    """What a rank has of a model's variables, and what it does for other ranks with them.

    Attributes:
        table: All variables.
        groups: The ranks that it exchanges values with.
        clock: Counts steps, after which the values of other ranks' variables are stale here.
        ties: The weights that several ranks of the pipeline have.
        bucket_counts: Number of buckets of gradients of each stage; none for one replica.
        buckets: The weights of each bucket that this rank sums up.
        shares_out: Whether replicas update weights for each other (ZeRO-1).
    """

    def __init__(
        self,
        extracted: ExtractedModel,
        plan: Plan,
        placement: Sequence[int],
        groups: ProcessGroups,
        others: Iterable[Any] = (),
        before: RankWeights | None = None,
    ) -> None:
        if before is not None:
            others = before.variables
        self.table = table = VariableTable.of(extracted, plan, placement, groups, others)
        self.clock: StepCounter = StepCounter() if before is None else before.clock
        self.variables: tuple[Any, ...] = tuple(row.variable for row in table.rows)
        self.groups, self._pipeline, self._peers = groups, groups.pipeline, groups.peers
        self._rank = rank = groups.pipeline.rank
        tied = [row for row in table.rows if row.trainable and len(row.ranks) > 1]
        self.ties = TiedWeights([(row.variable, row.ranks) for row in tied], groups.pipeline)
        self._used = {i for i, row in enumerate(table.rows) if rank in row.ranks}
        self.bucket_counts: list[int] = []
        self.buckets: dict[Bucket, list[Any]] = {}
        if groups.num_replicas > 1:
            stages = gradient_buckets(
                extracted.graph, plan.assignment, plan.num_stages, plan.fusion_threshold
            )
            self.bucket_counts = [len(buckets) for buckets in stages]
            self.buckets = {
                (stage, number): [extracted.variables[i] for i in bucket]
                for stage, buckets in enumerate(stages)
                if placement[stage] == rank
                for number, bucket in enumerate(buckets)
            }
        self._gradient_dtype = plan.gradient_dtype
        self.shares_out = plan.shard_optimizer and groups.num_replicas > 1
        self._of_replicas: list[list[Any]] = [[] for _ in range(groups.num_replicas)]
        for row in table.rows if self.shares_out else ():
            if row.trainable and row.owner == rank:
                self._of_replicas[row.replica].append(row.variable)

    def start_alike(self) -> None:
        """Gives every rank the first rank's values: initial weights and seeds.

        Where another pipeline has trained a variable, it gives the true value. Variables that were
        made without values get them on the ranks that use them, the same everywhere. Those that
        only other ranks use refuse to be read here once these have trained them.
        """
        for i, row in enumerate(self.table.rows):
            if i in self._used:
                keep_memory(row.variable)
            elif row.ranks:
                make_remote(row.variable, self.clock)
        everywhere = self._pipeline.allgather_json(self._stale())
        deferred = set(everywhere[0]).intersection(*everywhere[1:])
        for i in deferred & self.needed().keys():
            initialize_deferred(self.variables[i])
        self._share(
            [0] * len(self.variables), everywhere, set(range(len(self.variables))) - deferred
        )
        for i, variable in enumerate(self.variables):
            if i not in deferred or i in self._used:
                broadcast_variable(variable, 0, self._peers)

    def gather(self) -> None:
        """Gives every rank the value of each variable from the rank that trains it."""
        stale = self._pipeline.allgather_json(self._stale())
        self._share(self._owners, stale, range(len(self.variables)))

    def refresh(self) -> None:
        """Brings up to date what stages use and another pipeline has trained on another rank."""
        if self._pipeline.size == 1:
            return
        needed = [i for i in sorted(self._used) if is_stale(self.variables[i])]
        needed_by = self._pipeline.allgather_json(needed)
        if any(needed_by):
            stale = self._pipeline.allgather_json(self._stale())
            self._share(self._owners, stale, set().union(*needed_by))

    def publish(self) -> None:
        """Gives other ranks the values of weights they have from this one; all must call it."""
        self.spread()
        self.ties.publish()
        self.ties.refresh()

    def spread(self) -> None:
        """Gives all replicas the values that this one has updated for them, and takes theirs."""
        if self.shares_out:
            spread_values(self._of_replicas, self._peers)

    def compare_replicas(self) -> None:
        """Refuses to go on if replicas have other weights; all must call it."""
        check_all_replicas([self.variables[i] for i in sorted(self._used)], self.groups)

    def make_reduction(self) -> GradientReduction:
        """What adds up the gradients of this rank's buckets over the replicas."""
        owners = {
            key: [self.table[weight].replica for weight in bucket]
            for key, bucket in self.buckets.items()
        }
        shared_out = owners if self.shares_out else None
        return GradientReduction(self._peers, self.buckets, self._gradient_dtype, shared_out)

    def reader(self, stream: ValueStream) -> Callable[[Any], ValuePieces]:
        """Lets a rank read variables that it has not, one at a time; all ranks must call it."""
        self.refresh()
        numbers = {id(variable): i for i, variable in enumerate(self.variables)}
        read = stream.add(self.variables.__getitem__)

        def read_variable(variable: Any) -> ValuePieces:
            owner = self._pipeline.world_ranks[self.table[variable].owner]
            spec = TensorSpec(tuple(variable.shape), variable_dtype(variable))
            return read(owner, numbers[id(variable)], spec)

        return read_variable

    def owned(self) -> dict[int, Any]:
        """The variables that this rank tells of for all, by their position."""
        if self._peers.rank:
            return {}
        rows = enumerate(self.table.rows)
        return {i: row.variable for i, row in rows if row.owner == self._rank}

    def needed(self) -> dict[int, Any]:
        """The variables that this rank must have, by their position."""
        rows = enumerate(self.table.rows)
        return {i: row.variable for i, row in rows if i in self._used or not row.ranks}

    @property
    def _owners(self) -> list[int]:
        return [row.owner for row in self.table.rows]

    def _stale(self) -> list[int]:
        return [i for i, variable in enumerate(self.variables) if is_stale(variable)]

    def _share(
        self, roots: Sequence[int], stale: Sequence[Sequence[int]], which: Iterable[int]
    ) -> None:
        """Gives all ranks the values of some variables, from a rank that has true ones."""
        if self._pipeline.size == 1:
            return
        for i in sorted(which):
            # The owner's value is stale where another pipeline of the script has trained it.
            true = [rank for rank, theirs in enumerate(stale) if i not in theirs]
            root = roots[i] if roots[i] in true else true[0]
            broadcast_variable(self.variables[i], root, self._pipeline)


def broadcast_variable(variable: Any, root: int, ranks: Communicator) -> None:
    """Gives all ranks the value that a variable has on one of them; all of them must call it."""
    if ranks.size == 1:
        return
    if ranks.rank == root:
        value = value_of(variable)
    else:  # where it may not be read
        value = np.empty(tuple(variable.shape), variable_dtype(variable))
    ranks.broadcast(value, root)
    if ranks.rank != root:
        variable.assign(value)


def spread_values(of_ranks: Sequence[Sequence[Any]], ranks: Communicator) -> None:
    """Gives all ranks the values of variables that each of them has updated; all must call it.

    They go straight from one variable's memory into what becomes the others' memory.
    """
    label = "updated weights"
    # Each rank begins with another one, so that none is sent everything at once.
    others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
    receives = {}
    for rank in others:
        specs = [TensorSpec(tuple(v.shape), variable_dtype(v)) for v in of_ranks[rank]]
        if specs:
            receives[rank] = ranks.post_receive(specs, rank, _VALUES_TAG, label=label)
    mine = [to_buffer(tf.convert_to_tensor(v)) for v in of_ranks[ranks.rank]]
    for rank in others if mine else ():
        ranks.send(mine, rank, _VALUES_TAG, label=label)
    for rank, request in receives.items():
        for variable, value in zip(of_ranks[rank], request.wait(), strict=True):
            variable.assign(to_tensor(value))


def check_all_replicas(variables: Sequence[Any], groups: ProcessGroups) -> None:
    """Compares the variables of all stages between replicas; all ranks must call it."""
    problem = ""
    try:
        check_replicas(variables, groups.peers)
    except ReplicaError as error:
        problem = str(error)
    for theirs in groups.world.allgather_json(problem):
        if theirs:
            raise ReplicaError(theirs)


def check_replicas(variables: Sequence[Any], communicator: Communicator) -> None:
    """Compares variables between replicas, bit for bit; all of them must call this.

    Only a hash of each variable travels.
    """
    if communicator.size == 1:
        return
    own = [digest([to_buffer(tf.convert_to_tensor(variable))]) for variable in variables]
    everyones = communicator.allgather_json(own)
    found = [*zip_longest(*everyones)]
    different = [i for i, digests in enumerate(found) if len(set(digests)) > 1]
    if not different:
        return
    first = different[0]
    owners: dict[str | None, list[str]] = {}
    for rank, value in zip(communicator.world_ranks, found[first], strict=True):
        owners.setdefault(value, []).append(str(rank))
    values = "; ".join(
        f"{value or 'nothing'} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        for value, ranks in owners.items()
    )
    name = _name(variables[first]) if first < len(variables) else f"number {first}"
    raise ReplicaError(
        f"Variable {name} is not the same on all replicas. Received: hashes {values}. "
        f"{len(different)} of {len(found)} variables differ. Replicas stay equal as long as all of "
        "them begin with the same values and make the same steps: look for a callback, a layer or "
        "a script that writes weights on some ranks only, or with random numbers of its own."
    )


def _name(variable: Any) -> str:
    return repr(getattr(variable, "path", variable.name))
