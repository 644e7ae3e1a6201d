"""This machine, measured: memory of each rank, clocks of the ranks, speed of messages.

Run as a module it prints, on each rank of `tarantella doctor`, a line of JSON for its host, and one
of the links.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tarantella_pp.launch.records import RANK_VARIABLE, number_from
from tarantella_pp.launch.resources import this_host
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec, world

PROC, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_of_each_rank(communicator: Communicator, gpu: Any) -> int:
    """Bytes that each rank may take of its GPU, or else its host: the smallest share."""
    place = [socket.gethostname(), gpu.name if gpu else ""]
    there = communicator.allgather_json(place).count(place)
    own = (gpu.nbytes if gpu else memory_of_host()) // there
    return min(communicator.allgather_json(own))


def memory_of_host(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that the processes of this job may take on this host."""
    return min([int(psutil.virtual_memory().total), *_limits(proc, groups)])


def free_memory(share: int) -> int:
    """Bytes that this rank may take beyond what it has, of its share of the host's memory."""
    available = psutil.virtual_memory().available * share // memory_of_host()
    return min(int(available), share - memory_in_use())


def memory_in_use() -> int:
    """Bytes of the host's memory that this process has."""
    return int(psutil.Process().memory_info().rss)


def _limits(proc: Path, groups: Path) -> Iterator[int]:
    """The limits of this process's control group and of those above it."""
    for line in _read(proc).splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        # Version 2 has one tree of groups, version 1 one for each kind.
        root, file = (
            (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        )
        place = root / name.lstrip("/")
        for folder in (place, *place.parents):
            text = _read(folder / file).strip()
            if text.isdigit():  # not "max"
                yield int(text)
            if folder == root:
                break


def _read(path: Path) -> str:
    """A file's text; none where there is no such file, as on other systems."""
    try:
        return path.read_text()
    except OSError:
        return ""


_TAG = 6
_CLOCK_ROUNDS = 20
# Bytes of messages, both so large that a network asks the receiver for room first.
LARGE, SMALL = 1 << 20, 1 << 18
# How often each is sent: other work may disturb some rounds.
ROUNDS = 6
# Most of the time of a large message that counts as latency.
MOST_LATENCY = 0.9


def clock_offset(communicator: Communicator) -> float:
    """Returns what to add to this rank's `time.perf_counter()` to have rank 0's; collective."""
    # Each asks for the time, often enough that one answer comes at once: Cristian, "Probabilistic
    # clock synchronization", 1989.
    if communicator.rank == 0:
        for rank in range(1, communicator.size):
            for _ in range(_CLOCK_ROUNDS):
                _get(communicator, rank)
                _put(communicator, rank, time.perf_counter())
        return 0.0
    best = (np.inf, 0.0)
    for _ in range(_CLOCK_ROUNDS):
        asked = time.perf_counter()
        _put(communicator, 0, asked)
        theirs = _get(communicator, 0)
        answered = time.perf_counter()
        best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    trip, offset = best
    # The answer may have been made at any moment of the trip. Ranks of one host have one clock.
    return 0.0 if abs(offset) <= trip / 2 else offset


def _put(communicator: Communicator, rank: int, value: float) -> None:
    communicator.send([np.array([value])], rank, _TAG, label="time")


def _get(communicator: Communicator, rank: int) -> float:
    request = communicator.post_receive([TensorSpec((1,), "float64")], rank, _TAG, label="time")
    return float(request.wait()[0][0])


def measure_link(communicator: Communicator) -> tuple[float, float]:
    """Returns bytes per second of the slowest link, and seconds of each message more."""
    large, small = (_seconds(communicator, size) for size in (LARGE, SMALL))
    # Seconds are latency + bytes / speed. Of two sizes both follow, as far as measuring is steady.
    parts = LARGE / SMALL
    latency = min(max(0.0, (parts * small - large) / (parts - 1)), MOST_LATENCY * large)
    return LARGE / (large - latency), latency


def magnitude(bandwidth: float) -> float:
    """Returns the power of ten next to a measured speed: the same whenever it is measured."""
    return float(10.0 ** round(math.log10(bandwidth)))


def _seconds(communicator: Communicator, size: int) -> float:
    """Returns the seconds of the slowest message of a size, in the best of some rounds."""
    rank, ranks = communicator.rank, communicator.size
    data, spec = np.zeros(size, np.uint8), TensorSpec((size,), "uint8")
    seconds = np.zeros(ROUNDS)
    for i in range(ROUNDS):
        communicator.barrier()  # all send at once, as replicas do: they share their card
        start = time.perf_counter()
        request = communicator.post_receive([spec], (rank - 1) % ranks, 0, label="link speed")
        communicator.send([data], (rank + 1) % ranks, 0, label="link speed")
        request.wait()
        seconds[i] = time.perf_counter() - start
        communicator.flush()
    communicator.allreduce(seconds, "max")
    return float(seconds.min())


def main() -> None:
    """Prints what this host has, before it starts MPI, then how fast messages between ranks are."""
    _tell({"rank": number_from(RANK_VARIABLE) or 0, **this_host()})
    ranks = world()
    if ranks.size > 1:
        bandwidth, latency = measure_link(ranks)
        if ranks.rank == 0:
            _tell({"bandwidth": bandwidth, "latency": latency})


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
