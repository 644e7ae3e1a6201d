"""What a host has, and a rank's share of it: cores with threads, a GPU."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from tarantella_pp.errors import LaunchError, version_of
from tarantella_pp.launch.environment import number_of
from tarantella_pp.launch.records import LOCAL_RANK_VARIABLE, number_from

# Whether a rank is bound to its share of the cores.
BIND_VARIABLE = "TNT_BIND"
# Threads of a rank, where the user has said how many.
COUNT_VARIABLE = "TNT_THREADS"
# Most ranks of a host, for launchers that do not tell a rank how many its own has.
RANKS_VARIABLE = "TNT_RANKS_PER_NODE"
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
# In which MPICH and its relatives, and Open MPI, say how many ranks a host has; or the most of all.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", RANKS_VARIABLE)
_TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
SHARE_VARIABLE = "TNT_SHARE_GPUS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE_VISIBLE = {_VISIBLE: "-1"}
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
# With these each task sees GPUs of its own only.
_GIVEN_BY_SLURM = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")
_DEVICES = pathlib.Path("/dev")
_Gpu = TypeVar("_Gpu")


def take_share(environ: MutableMapping[str, str]) -> None:
    """Gives this process its part of the cores of the host it is on, and as many threads."""
    rank = number_from(LOCAL_RANK_VARIABLE, environ) or 0
    ranks = next(filter(None, (number_of(environ, name) for name in _LOCAL_SIZES)), 1)
    own = os.sched_getaffinity(0)
    cores, wanted = cores_of_node(environ), environ.get(COUNT_VARIABLE, "")
    threads = number_of(environ, COUNT_VARIABLE) or threads_per_rank(ranks, environ)
    chosen = any(name in environ for name in THREAD_VARIABLES) and not wanted
    # A bound rank finds in its caches what it left there. But where threads leave cores free, jobs
    # must be free to move to them, or two of them would share a core beside idle ones.
    fills = ranks > 1 and threads == cores // ranks
    if environ.get(BIND_VARIABLE) and fills and not chosen and len(own) == cores and rank < ranks:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setaffinity(0, share(own, rank, ranks))
    for name in THREAD_VARIABLES:
        if wanted or name not in environ:
            environ[name] = str(threads)


def cores_of_node(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of cores this process may run on, and its job, where that is Slurm's."""
    return min(len(os.sched_getaffinity(0)), number_of(environ, "SLURM_CPUS_ON_NODE") or 1 << 20)


def threads_per_rank(ranks_of_node: int, given: Mapping[str, str]) -> int:
    """Returns the threads of one rank, such that the ranks of a node do not share cores."""
    # What Slurm was asked for for each task counts where ranks are its tasks.
    asked, there = number_of(given, "SLURM_CPUS_PER_TASK"), number_of(given, "SLURM_CPUS_ON_NODE")
    if asked and not (there and asked * ranks_of_node > there):
        return asked
    return max(1, cores_of_node(given) // ranks_of_node)


def share(cores: Iterable[int], rank: int, ranks: int) -> set[int]:
    """Returns the cores of one rank: neighbours, of as few sockets as can be."""
    ordered = sorted(cores, key=_place)
    begin, end = (len(ordered) * i // ranks for i in (rank, rank + 1))
    return set(ordered[begin:end])


def _place(core: int) -> tuple[int, int, int]:
    """Where a core is: socket, physical core, and which of its hardware threads."""
    folder = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        names = ("physical_package_id", "core_id")
        socket, physical = (int((folder / name).read_text(encoding="ascii")) for name in names)
    except (OSError, ValueError):
        socket = physical = 0
    return socket, physical, core


def take_gpu(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Leaves this process one GPU of its host, whose memory it takes as it needs it."""
    # Before TensorFlow has looked for GPUs variables are enough; afterwards it takes a call.
    has_own = any(name in environ for name in _GIVEN_BY_SLURM)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        _tell_tensorflow(tensorflow, environ, None if has_own else local_rank)
        return
    gpus = visible_gpus(environ)
    if gpus and not has_own:
        environ[_VISIBLE] = _chosen(gpus, environ, local_rank)
    if gpus:
        environ.setdefault(_GROWTH, "true")


def _tell_tensorflow(
    tensorflow: Any, environ: MutableMapping[str, str], local_rank: int | None
) -> None:
    config = tensorflow.config
    gpus = config.list_physical_devices("GPU")
    if gpus and local_rank is not None:
        gpus = [_chosen(gpus, environ, local_rank)]
    if not gpus:
        return
    try:
        config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise LaunchError(
            "Each rank gets a GPU of its own, but TensorFlow has taken all of this host already. "
            "Call tarantella_pp.init() before anything is computed or a model built, or start the "
            "job with `tarantella`."
        ) from error


def _chosen(gpus: Sequence[_Gpu], environ: MutableMapping[str, str], local_rank: int) -> _Gpu:
    if local_rank >= len(gpus) and environ.get(SHARE_VARIABLE) != "1":
        count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        raise LaunchError(
            f"This host has {count}, and at least {local_rank + 1} ranks. Start one rank for each "
            f"GPU of a host, share them with --share-gpus or {SHARE_VARIABLE}=1, or use none with "
            f"{_VISIBLE}=-1."
        )
    return gpus[local_rank % len(gpus)]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that CUDA would show, which ends at the first invalid one."""
    given = environ.get(_VISIBLE)
    if given is None:
        found = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(i) for i in range(len(found))]
    names = [name.strip() for name in given.split(",")]
    invalid = (i for i, name in enumerate(names) if not name or name.startswith("-"))
    return names[: next(invalid, len(names))]


def this_host() -> dict[str, Any]:
    """Returns versions, cores and GPUs of this host."""
    from tarantella_pp.launch.mpi_launchers import library_version  # for doctor alone

    return {
        "versions": {
            "python": platform.python_version(),
            "tarantella_pp": version_of("tarantella-pp"),
            "tensorflow": version_of("tensorflow") or version_of("tensorflow-cpu"),
            "keras": version_of("keras"),
            "MPI": library_version() or None,
        },
        "cores": cores_of_node(),
        "gpus": len(visible_gpus({})),  # all of them, whatever this rank was left
    }
