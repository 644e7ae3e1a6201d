"""Which replica keeps the optimizer state of which weight (ZeRO-1, Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence


def shard_owners(nbytes: Sequence[int], num_replicas: int) -> list[int]:
    """Shares weights out to replicas, so that each keeps about as many bytes.

    Weights stay whole, for most optimizers look at all of a weight. The largest come first, each
    to the replica with the fewest bytes so far (Graham 1969): the fullest replica has at most 4/3
    of what it would have in the best of all cases. The same on all ranks.
    """
    owners = [0] * len(nbytes)
    loads = [(0, 0, replica) for replica in range(num_replicas)]
    for i in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        load, count, replica = min(loads)
        owners[i] = replica
        loads[replica] = (load + nbytes[i], count + 1, replica)
    return owners


def weight_replicas(sizes: Sequence[int], positions: Sequence[int], num_replicas: int) -> list[int]:
    """Shares the weights of each rank of a pipeline out to the replicas of that rank."""
    found = [0] * len(sizes)
    for position in set(positions):
        own = [i for i, other in enumerate(positions) if other == position]
        for i, replica in zip(
            own, shard_owners([sizes[i] for i in own], num_replicas), strict=True
        ):
            found[i] = replica
    return found
