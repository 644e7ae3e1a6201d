"""Messages to and fro between two ranks, timed."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages: one for the latency, one of the size of an activation."""
_MOST = {SMALL: 200, LARGE: 20}
_ENOUGH_SECONDS = 0.4
"""How long one size is tried: over a slow link, only a few times."""


def measure_pair(group: Communicator, other: int) -> dict[str, float]:
    """Returns latency and bandwidth of messages to another rank; both must call it."""
    latency = _seconds_per_message(group, other, SMALL)
    seconds = _seconds_per_message(group, other, LARGE)
    return {"latency_us": latency * 1e6, "bandwidth_gb_per_s": LARGE / seconds / 1e9}


def _seconds_per_message(group: Communicator, other: int, size: int) -> float:
    """Returns the fastest of some ways there and back, halved.

    The lower rank decides how often: the first byte of a message says whether another one comes.
    """
    data, spec = np.ones(size, np.uint8), TensorSpec((size,), "uint8")
    times: list[float] = []
    begin, goes_on = time.perf_counter(), True
    request = group.post_receive([spec], other, tag=0, label="link")
    while goes_on:
        start = time.perf_counter()
        if group.rank < other:
            goes_on = len(times) + 1 < _MOST[size] and start - begin < _ENOUGH_SECONDS
            data[0] = goes_on
            group.send([data], other, tag=0, label="link")
            request.wait()
        else:
            goes_on = bool(request.wait()[0][0])
        if goes_on:
            request = group.post_receive([spec], other, tag=0, label="link")
        if group.rank > other:
            group.send([data], other, tag=0, label="link")
        times.append((time.perf_counter() - start) / 2)
    group.flush()
    return min(times)
