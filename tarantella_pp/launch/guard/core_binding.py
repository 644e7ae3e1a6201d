"""Which cores a rank runs on, with how many threads: its own share of the host it is on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Collection, Iterable, Mapping, MutableMapping

from tarantella_pp.launch.guard import sockets
from tarantella_pp.launch.guard.launch_environment import number_of

BIND_VARIABLE = "TNT_BIND"
"""How a rank is bound: to its share of the cores, to a socket, to its memory as well, or not."""
TO_CORES, TO_SOCKET, TO_MEMORY = "cores", "socket", "memory"
COUNT_VARIABLE = "TNT_THREADS"
"""Threads of a rank, where the user has said how many."""
RANKS_VARIABLE = "TNT_RANKS_PER_NODE"
"""Most ranks of a host, for launchers that do not tell a rank how many its own has."""
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_LOCAL_RANKS = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""What MPICH and its relatives, and Open MPI, call a rank's place on its node."""
_VISIT_SECONDS = 2.0
_TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")


def cores_to_share(cores: int, ranks: int, threads: int) -> int | None:
    """Says whether the ranks of a node should be bound to cores.

    A bound rank finds in its caches what it left there, and does not lose its core to the threads
    of another rank. But jobs that leave cores free must be free to move to them, or two of them
    would share a core beside idle ones.
    """
    return cores if ranks > 1 and threads == cores // ranks else None


def take_share(environ: MutableMapping[str, str], siblings: Collection[int] | None = None) -> None:
    """Gives this process its part of its host: cores to run on, and as many threads.

    It counts the cores of the host it is on, which may have others than that of the launcher.
    """
    rank, ranks = _local_place(environ)
    way = environ.get(BIND_VARIABLE, "")
    cores = cores_of_node(environ)
    if way in (TO_SOCKET, TO_MEMORY):
        threads = sockets.pin(rank, ranks, memory=way == TO_MEMORY)
    elif siblings is not None and set(siblings) != _affinity():
        threads, way = cores, ""
    else:
        threads = max(1, cores // ranks)
    wanted = environ.get(COUNT_VARIABLE, "")
    said = number_of(environ, COUNT_VARIABLE) or cores_of_task(environ, ranks)
    threads = threads if said is None else said
    chosen = any(name in environ for name in THREAD_VARIABLES) and not wanted
    if way == TO_CORES and not chosen and cores_to_share(cores, ranks, threads):
        bind_to_share(rank, ranks, cores)
    for name in THREAD_VARIABLES:
        if wanted or name not in environ:
            environ[name] = str(threads)


def cores_of_starter(process: int) -> set[int] | None:
    """Returns the cores of the process that has started this one, where that can be told.

    MPICH's proxy looks at the processor of its host while ranks begin: it runs on one core after
    the other then, and on its own again some milliseconds later. A rank that had more cores than
    that would think it had been bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    own, deadline = _affinity(), time.monotonic() + _VISIT_SECONDS
    try:
        while not own <= (cores := os.sched_getaffinity(process)) and len(cores) == 1:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
    except OSError:
        return None
    return cores


def cores_of_node(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of cores this process may run on, and its job, where that is Slurm's."""
    return min(len(_affinity()), number_of(environ, "SLURM_CPUS_ON_NODE") or 1 << 20)


def cores_of_task(environ: Mapping[str, str], ranks: int) -> int | None:
    """Returns the cores that Slurm was asked for for each task, where ranks are its tasks."""
    cores = number_of(environ, "SLURM_CPUS_PER_TASK")
    there = number_of(environ, "SLURM_CPUS_ON_NODE")
    return None if cores and there and cores * ranks > there else cores


def bind_to_share(rank: int, ranks: int, wanted: int) -> None:
    """Binds this process to its share of the cores, where it has all that are wanted."""
    cores = _affinity()
    if len(cores) == wanted >= ranks > rank:
        with contextlib.suppress(OSError, AttributeError):  # some containers and systems forbid it
            os.sched_setaffinity(0, share(cores, rank, ranks))


def share(cores: Iterable[int], rank: int, ranks: int) -> set[int]:
    """Returns the cores of one rank: neighbours, of as few sockets as can be."""
    ordered = sorted(cores, key=_place)
    begin, end = (len(ordered) * i // ranks for i in (rank, rank + 1))
    return set(ordered[begin:end])


def _local_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of this process among the ranks of its host, and how many these are."""
    for names in _LOCAL_RANKS:
        rank, ranks = (environ.get(name, "") for name in names)
        if rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks):
            return int(rank), int(ranks)
    local, most = environ.get("SLURM_LOCALID", ""), environ.get(RANKS_VARIABLE, "")
    number = int(local) if local.isdecimal() else 0
    return number, max(1, int(most)) if most.isdecimal() else 1


def _affinity() -> set[int]:
    """Returns the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


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
