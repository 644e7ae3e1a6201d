"""What `tarantella doctor` runs on each rank: a line of JSON for each host, and each two ranks."""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarantella_pp.runtime.comm.communicator import Communicator

# Bytes of messages: one for the latency, one of the size of an activation; and how often.
SMALL, LARGE, ROUNDS = 8, 4 << 20, 20


def main() -> None:
    """Prints what this host has, then how fast messages between ranks are."""
    from tarantella_pp.launch.records import RANK_VARIABLE, number_from

    _tell({"rank": number_from(RANK_VARIABLE) or 0, **this_host()})
    from tarantella_pp.runtime.comm.communicator import world

    group = world()
    for pair in itertools.combinations(range(group.size), 2):
        group.barrier()  # one pair after the other
        found = measure_pair(group, sum(pair) - group.rank) if group.rank in pair else {}
        if group.rank == pair[1]:  # at once: what comes next may never end
            _tell({"pair": pair, **found})


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def this_host() -> dict[str, Any]:
    """Returns versions, cores and GPUs of this host."""
    from tarantella_pp.dependencies import version_of
    from tarantella_pp.launch.mpi_launchers import library_version
    from tarantella_pp.launch.resources import cores_of_node, visible_gpus

    return {
        "versions": {
            "python": platform.python_version(),
            "tarantella_pp": version_of("tarantella-pp"),
            "tensorflow": version_of("tensorflow") or version_of("tensorflow-cpu"),
            "keras": version_of("keras"),
            "MPI": library_version() or None,
        },
        "cores": cores_of_node(),
        "gpus": len(visible_gpus({})),  # all of them, whatever this rank was left
    }


def measure_pair(group: Communicator, other: int) -> dict[str, float]:
    """Returns latency and bandwidth of messages to another rank; both must call it."""
    # The fastest of some ways there and back: a mean would measure what else the hosts do.
    latency, seconds = (
        min(_round_trip(group, other, size) for _ in range(ROUNDS)) / 2 for size in (SMALL, LARGE)
    )
    return {"latency_us": latency * 1e6, "bandwidth_gb_per_s": LARGE / seconds / 1e9}


def _round_trip(group: Communicator, other: int, size: int) -> float:
    import numpy as np

    from tarantella_pp.runtime.comm.communicator import TensorSpec

    data, spec = np.ones(size, np.uint8), TensorSpec((size,), "uint8")
    start = time.perf_counter()
    request = group.post_receive([spec], other, tag=0, label="link")
    if group.rank > other:  # sends back what has come
        request.wait()
    group.send([data], other, tag=0, label="link")
    if group.rank < other:
        request.wait()
    seconds = time.perf_counter() - start
    group.flush()
    return seconds


if __name__ == "__main__":
    main()
