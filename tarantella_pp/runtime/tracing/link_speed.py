"""How fast messages travel from rank to rank, measured."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

NBYTES, ROUNDS = 1 << 20, 6
"""Size of a message, and how often one is sent: other work may disturb some rounds."""


def measure_bandwidth(communicator: Communicator) -> float:
    """Returns the bytes per second of the slowest link; all ranks must call it.

    Every rank sends to the next one at the same time, as in sums over replicas.

    Args:
        communicator: Two ranks or more.
    """
    rank, size = communicator.rank, communicator.size
    data, spec = np.zeros(NBYTES, np.uint8), TensorSpec((NBYTES,), "uint8")
    seconds = np.zeros(ROUNDS)
    for i in range(ROUNDS):
        communicator.barrier()
        start = time.perf_counter()
        request = communicator.post_receive([spec], (rank - 1) % size, 0, label="link speed")
        communicator.send([data], (rank + 1) % size, 0, label="link speed")
        request.wait()
        seconds[i] = time.perf_counter() - start
        communicator.flush()
    communicator.allreduce(seconds, "max")
    return NBYTES / float(seconds.min())
