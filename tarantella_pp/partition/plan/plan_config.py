"""What a plan is for: the options of `make_plan` that its file states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

MemoryLimit = int | tuple[int, ...]
"""Bytes that each stage may have, or one number for each."""

Placement = Literal["pipelines-together", "replicas-together"]
"""Whether a pipeline's ranks are neighbours, or a stage's."""
NarrowDtype = Literal["bfloat16"]
"""In what numbers travel, from stage to stage or between replicas, if not as they are."""
FUSION_THRESHOLD = 32 * 2**20
"""Bytes of a bucket of gradients, where no other is asked for."""


class Coordinates(NamedTuple):
    """Where a rank stands.

    Attributes:
        replica: The pipeline it is in.
        position: Its rank in that pipeline.
    """

    replica: int
    position: int


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a plan was made with; those that were left open are chosen; see `Plan`."""

    num_stages: int
    num_micro_batches: int
    num_replicas: int
    batch_size: int
    schedule: str
    balance: str
    memory_limit: MemoryLimit | None
    recompute: tuple[int, ...] = ()
    except_last: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    placement: Placement = "pipelines-together"
    fusion_threshold: int = FUSION_THRESHOLD
    shard_optimizer: bool = False
    gradient_dtype: NarrowDtype | None = None
    wire_dtype: NarrowDtype | None = None

    @property
    def shards(self) -> int:
        """Replicas that share out the optimizer state; 1 where each has all of it."""
        return self.num_replicas if self.shard_optimizer else 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one replica, rounded up."""
        return micro_batch_size(self.batch_size, self.num_replicas, self.num_micro_batches)

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return 1 + max(self.ranks) if self.ranks else self.num_stages

    @property
    def world_size(self) -> int:
        """Ranks of all pipelines."""
        return self.num_replicas * self.num_ranks

    def world_rank(self, replica: int, position: int) -> int:
        """Returns the rank in the job of a position in a replica."""
        return rank_in_job(replica, position, self.num_replicas, self.num_ranks, self.placement)

    def coordinates(self, world_rank: int) -> Coordinates:
        """Returns replica and position of a rank in the job: undoes `world_rank`."""
        if self.placement == "pipelines-together":
            return Coordinates(*divmod(world_rank, self.num_ranks))
        position, replica = divmod(world_rank, self.num_replicas)
        return Coordinates(replica, position)

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The memory limit of each stage; `None` for any."""
        limit = self.memory_limit
        return (limit,) * self.num_stages if isinstance(limit, int) else limit


def common_limit(limits: Sequence[int]) -> int | None:
    """Returns the memory limit of all stages, `None` where they have different ones."""
    return limits[0] if len(set(limits)) == 1 else None


def rank_in_job(
    replica: int, position: int, num_replicas: int, num_ranks: int, placement: str
) -> int:
    """Returns the rank in the job of a position in a replica.

    Two replicas of three ranks::

        pipelines-together     replica 0: 0 1 2     replicas-together     replica 0: 0 2 4
                               replica 1: 3 4 5                           replica 1: 1 3 5
    """
    if placement == "pipelines-together":
        return replica * num_ranks + position
    return position * num_replicas + replica


def micro_batch_size(batch_size: int, num_replicas: int, num_micro_batches: int) -> int:
    """Returns the samples of one micro-batch on one replica, rounded up."""
    return -(-batch_size // (num_replicas * num_micro_batches))
