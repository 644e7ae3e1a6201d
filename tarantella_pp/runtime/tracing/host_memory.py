"""How much memory a rank may take: its share of what its GPU or its host has, or the job may."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from tarantella_pp.internals.devices import gpu_in_use
from tarantella_pp.runtime.comm.communicator import Communicator

PROC, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_of_each_rank(communicator: Communicator) -> int:
    """Bytes that each rank may take: the smallest share of a device, on all ranks the same.

    A rank's device is its GPU, which it may share, or else its host.
    """
    gpu = gpu_in_use()
    place = [socket.gethostname(), gpu.name if gpu else ""]
    there = communicator.allgather_json(place).count(place)
    own = (gpu.nbytes if gpu else memory_of_host()) // there
    return min(communicator.allgather_json(own))


def memory_of_host(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that the processes of this job may take on this host."""
    return min([int(psutil.virtual_memory().total), *_limits(proc, groups)])


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
