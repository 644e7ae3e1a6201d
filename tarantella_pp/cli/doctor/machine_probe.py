"""What `tarantella doctor` runs on ranks: messages between pairs of them, and what a rank does.

    python -m tarantella_pp.cli.doctor.machine_probe 0,2,3 [compute]

Measures the link between each two of the ranks it is given, one pair after the other. The last rank
of the job writes a line of JSON for each pair, `{"pair": [0, 2], "latency_us": ...,
"bandwidth_gb_per_s": ...}`; with `compute` also `{"rank": {...}}`, what `ComputeProbes` found.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from tarantella_pp.cli.doctor.compute_probes import ComputeProbes
from tarantella_pp.cli.doctor.ping_pong import measure_pair
from tarantella_pp.runtime.comm.communicator import Communicator, world


def main(ranks: str, *options: str) -> None:
    """Measures."""
    group = world()
    for pair in itertools.combinations(map(int, ranks.split(",")), 2):
        group.barrier()
        found = {}
        if group.rank in pair:
            found = measure_pair(group, sum(pair) - group.rank)
        _tell(group, {"pair": pair, **group.allgather_json(found)[pair[0]]})
    if options:
        _tell(group, {"rank": ComputeProbes(group).measure()})


def _tell(group: Communicator, found: dict[str, Any]) -> None:
    """Writes what was found, at once: what comes next may never end."""
    if group.rank == group.size - 1:
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
