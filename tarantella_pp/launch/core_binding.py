"""Which cores a rank runs on: its own share, where the ranks of a node use all of them."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable, Mapping

BIND_VARIABLE = "TNT_BIND_CORES"
"""Number of cores that the ranks of a node share; set where each is to have its part of them."""
_LOCAL_RANKS = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""What MPICH and its relatives, and Open MPI, call a rank's place on its node."""
_TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")


def cores_to_share(cores: int, ranks: int, threads: int) -> int | None:
    """Says whether the ranks of a node should be bound to cores.

    A bound rank finds in its caches what it left there, and does not lose its core to the threads
    of another rank. But jobs that leave cores free must be free to move to them, or two of them
    would share a core beside idle ones.

    Args:
        cores: Cores of the node.
        ranks: Ranks on it.
        threads: Threads of one rank.

    Returns:
        The number of cores to share, or `None` where ranks should not be bound.
    """
    return cores if ranks > 1 and threads == cores // ranks else None


def bind_to_share(given: Mapping[str, str]) -> None:
    """Binds this process to its share of the cores, if the environment says so.

    It does nothing where somebody else has bound the process already.
    """
    wanted = given.get(BIND_VARIABLE, "")
    place = next(
        ((given[rank], given[size]) for rank, size in _LOCAL_RANKS if {rank, size} <= given.keys()),
        ("", ""),
    )
    if not all(text.isdigit() for text in (wanted, *place)) or not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    rank, size = map(int, place)
    if len(cores) == int(wanted) >= size > rank:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setaffinity(0, share(cores, rank, size))


def share(cores: Iterable[int], rank: int, ranks: int) -> set[int]:
    """Returns the cores of one rank: neighbours, of as few sockets as can be."""
    ordered = sorted(cores, key=_place)
    begin, end = (len(ordered) * i // ranks for i in (rank, rank + 1))
    return set(ordered[begin:end])


def _place(core: int) -> tuple[int, int, int]:
    """Where a core is: socket, physical core, and which of its hardware threads."""
    numbers = []
    for name in ("physical_package_id", "core_id"):
        try:
            text = (_TOPOLOGY / f"cpu{core}" / "topology" / name).read_text(encoding="ascii")
            numbers.append(int(text))
        except (OSError, ValueError):
            numbers.append(0)
    return numbers[0], numbers[1], core
