"""Which micro-batches of a batch a replica computes.

The batch is cut as if one pipeline computed all of it, and each replica takes neighbouring
micro-batches. So the numbers do not depend on how many replicas there are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShare:
    """One replica's micro-batches of a batch.

    A replica that gets none because the batch is too small runs the first sample nevertheless, for
    all replicas must compile and exchange the same; what comes of it does not count.

    Attributes:
        sizes: Size of each micro-batch of the whole batch.
        first: Number of the replica's first micro-batch.
        count: Number of its micro-batches.
    """

    sizes: tuple[int, ...]
    first: int
    count: int

    @property
    def is_spare(self) -> bool:
        """Whether no micro-batch is left for the replica."""
        return not self.count

    @property
    def own_sizes(self) -> tuple[int, ...]:
        """Size of each micro-batch that the replica runs."""
        return self.sizes[self.first : self.first + self.count] or (1,)

    @property
    def own_rows(self) -> slice:
        """The samples that it runs."""
        begin = 0 if self.is_spare else sum(self.sizes[: self.first])
        return slice(begin, begin + sum(self.own_sizes))

    @property
    def counted_rows(self) -> int:
        """Number of the samples that it runs and that count."""
        return 0 if self.is_spare else sum(self.own_sizes)


def batch_shares(rows: int, num_micro_batches: int, num_replicas: int = 1) -> list[BatchShare]:
    """Shares a batch among replicas."""
    sizes = micro_batch_sizes(rows, num_micro_batches * num_replicas)
    few, larger = divmod(len(sizes), num_replicas)
    counts = [few + (replica < larger) for replica in range(num_replicas)]
    return [BatchShare(sizes, sum(counts[:r]), count) for r, count in enumerate(counts)]


def micro_batch_sizes(rows: int, num_micro_batches: int) -> tuple[int, ...]:
    """Cuts a batch into micro-batches whose sizes differ by one at most."""
    count = max(1, min(num_micro_batches, rows))
    small, larger = divmod(rows, count)
    return tuple(small + (i < larger) for i in range(count))
