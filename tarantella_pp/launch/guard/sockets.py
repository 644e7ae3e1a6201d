"""Ranks on sockets of their own: cores, and memory, of one NUMA node each."""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform

from tarantella_pp.errors import LaunchError

_NODES = pathlib.Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, which glibc has no function for."""
_MPOL_BIND = 2


def pin(rank: int, ranks: int, *, memory: bool) -> int:
    """Binds this process to a socket, as `numactl --cpunodebind` would; returns its cores."""
    nodes = of_this_host()
    if ranks > len(nodes):
        raise LaunchError(
            f"--pin-to-socket gives each rank a socket of its own. This host has {len(nodes)} "
            f"(NUMA nodes with cores that this process may use), and {ranks} ranks. Leave it out, "
            "or start fewer ranks on it."
        )
    node = sorted(nodes)[rank]
    try:
        os.sched_setaffinity(0, nodes[node])
    except OSError as error:
        raise LaunchError(f"--pin-to-socket is not allowed on this host: {error}") from error
    if memory:
        _bind_memory(node)
    return len(nodes[node])


def of_this_host() -> dict[int, set[int]]:
    """Returns the cores of each NUMA node, as far as this process may run on them."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    usable, found = os.sched_getaffinity(0), {}
    for path in _NODES.glob("node[0-9]*/cpulist"):
        cores = _cores(path.read_text(encoding="ascii")) & usable
        if cores:
            found[int(path.parent.name.removeprefix("node"))] = cores
    return found


def _cores(text: str) -> set[int]:
    """Reads a list such as `0-3,8`."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def _bind_memory(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise LaunchError(
            "--pin-memory-to-socket works on x86-64 and ARM only. "
            f"Received: a host with {platform.machine()}"
        )
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(64 * words + 1)) != 0:
        text = os.strerror(ctypes.get_errno())
        raise LaunchError(f"--pin-memory-to-socket is not allowed on this host: {text}")
