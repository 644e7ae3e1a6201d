"""The weights of one rank: who else has them, who updates them, what is summed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.gradient_buckets import gradient_buckets
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.replicas.owned_values import OwnedValues
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.replicas.replica_check import check_all_replicas
from tarantella_pp.runtime.state.owners import Owners
from tarantella_pp.runtime.state.tied_weights import TiedWeights, weights_of_several_ranks
from tarantella_pp.runtime.state.trainers import Trainers

Bucket: TypeAlias = tuple[int, int]
"""A stage, and the number of one of its buckets of gradients."""


class RankWeights:
    """What a rank has of a model's weights, and what it does for other ranks with them.

    Attributes:
        owners: The ranks of a pipeline that have each variable.
        trainers: The ranks that update each weight.
        ties: The weights that several ranks of the pipeline have.
        bucket_counts: Number of buckets of gradients of each stage; none for one replica.
        buckets: The weights of each bucket that this rank sums up.
        updated: The weights of this rank, if replicas update them for each other; else `None`.
    """

    def __init__(
        self,
        extracted: ExtractedModel,
        plan: Plan,
        placement: Sequence[int],
        groups: ProcessGroups,
        trainable: Sequence[Any],
    ) -> None:
        rank, replicas = groups.pipeline.rank, groups.num_replicas
        sharded = plan.shard_optimizer and replicas > 1
        self._groups = groups
        self._variables = extracted.variables
        self.owners = Owners(extracted, plan.assignment, placement, rank)
        self.trainers = Trainers(self.owners, extracted.variables, groups, sharded)
        self.ties = TiedWeights(weights_of_several_ranks(extracted, self.owners), groups.pipeline)
        self.bucket_counts: list[int] = []
        self.buckets: dict[Bucket, list[Any]] = {}
        if replicas > 1:
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
        self.updated: OwnedValues | None = None
        if sharded:
            own = [weight for weight in trainable if self.owners.is_own(weight)]
            replica_of = [self.trainers.replica(weight) for weight in own]
            self.updated = OwnedValues(groups.peers, own, replica_of)

    def publish(self) -> None:
        """Gives other ranks the values of weights they have from this one; all must call it."""
        if self.updated is not None:
            self.updated.spread()
        self.ties.publish()
        self.ties.refresh()

    def compare_replicas(self) -> None:
        """Refuses to go on if replicas have other weights; all must call it."""
        rank = self._groups.pipeline.rank
        own = [v for v in self._variables if rank in self.owners.ranks(v)]
        check_all_replicas(own, self._groups)
