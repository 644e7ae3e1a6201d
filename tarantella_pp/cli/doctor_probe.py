"""What `tarantella doctor` runs on each rank: a line of JSON for each host, one of links."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any


def main() -> None:
    """Prints what this host has, then how fast messages between ranks are."""
    from tarantella_pp.launch.records import RANK_VARIABLE, number_from

    _tell({"rank": number_from(RANK_VARIABLE) or 0, **this_host()})
    from tarantella_pp.runtime.comm.communicator import world
    from tarantella_pp.runtime.comm.machine import measure_link

    ranks = world()
    if ranks.size > 1:
        bandwidth, latency = measure_link(ranks)
        if ranks.rank == 0:
            _tell({"bandwidth": bandwidth, "latency": latency})


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def this_host() -> dict[str, Any]:
    """Returns versions, cores and GPUs of this host."""
    from tarantella_pp.errors import version_of
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


if __name__ == "__main__":
    main()
