"""How far apart the clocks of the ranks are."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

_TAG = 6
_ROUNDS = 20
_FLOAT = np.dtype(np.float64)


def clock_offset(communicator: Communicator) -> float:
    """Returns what to add to this rank's `time.perf_counter()` to have that of rank 0.

    Each rank asks rank 0 for the time, often enough that one answer comes at once: Cristian,
    "Probabilistic clock synchronization", 1989. All ranks must call this.
    """
    if communicator.rank == 0:
        for rank in range(1, communicator.size):
            for _ in range(_ROUNDS):
                _get(communicator, rank)
                _put(communicator, rank, time.perf_counter())
        return 0.0
    best = (np.inf, 0.0)
    for _ in range(_ROUNDS):
        asked = time.perf_counter()
        _put(communicator, 0, asked)
        theirs = _get(communicator, 0)
        answered = time.perf_counter()
        best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    trip, offset = best
    return 0.0 if abs(offset) <= trip / 2 else offset


def _put(communicator: Communicator, rank: int, value: float) -> None:
    communicator.send([np.array([value], _FLOAT)], rank, _TAG, label="time")


def _get(communicator: Communicator, rank: int) -> float:
    request = communicator.post_receive([TensorSpec((1,), _FLOAT)], rank, _TAG, label="time")
    return float(request.wait()[0][0])
