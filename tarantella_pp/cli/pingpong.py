"""The script that `tarantella doctor` runs on two ranks: messages to and fro, timed.

Writes `{"latency_us": ..., "bandwidth_gb_per_s": ...}` to the file it is given.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import numpy as np

from tarantella_pp.runtime.comm.communicator import (
    Communicator,
    TensorSpec,
    world,
)

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages: one for the latency, one of the size of an activation."""


def main() -> None:
    """Measures, and has rank 0 write the result."""
    group = world()
    latency = _seconds_per_message(group, SMALL, repeats=200)
    seconds = _seconds_per_message(group, LARGE, repeats=20)
    if group.rank == 0:
        result = {"latency_us": latency * 1e6, "bandwidth_gb_per_s": LARGE / seconds / 1e9}
        pathlib.Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


def _seconds_per_message(group: Communicator, size: int, repeats: int) -> float:
    """Returns the fastest of some ways there and back, halved."""
    data, spec, other = np.ones(size, np.uint8), TensorSpec((size,), "uint8"), 1 - group.rank
    times = []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        request = group.post_receive([spec], other, tag=0)
        if group.rank == 0:
            group.send([data], other, tag=0)
        request.wait()
        if group.rank == 1:
            group.send([data], other, tag=0)
        times.append((time.perf_counter() - start) / 2)
    group.flush()
    return min(times)


if __name__ == "__main__":
    main()
