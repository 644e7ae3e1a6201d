"""Whether the weights are still the same on all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import tensorflow as tf

from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm.collective import digest
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups


def check_all_replicas(variables: Sequence[Any], groups: ProcessGroups) -> None:
    """Compares the variables of all stages between replicas; all ranks must call it."""
    problem = ""
    try:
        check_replicas(variables, groups.peers)
    except ReplicaError as error:
        problem = str(error)
    for told in groups.world.allgather_json(problem):
        if told:
            raise ReplicaError(told)


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
