"""One GPU for each rank of a host; where there is no GPU nothing changes, and nothing is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tarantella_pp.errors import LaunchError

SHARE_VARIABLE = "TNT_SHARE_GPUS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE_VISIBLE = {_VISIBLE: "-1"}
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_GIVEN_BY_SLURM = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")
"""With these each task sees GPUs of its own only."""
_DEVICES = Path("/dev")
_Gpu = TypeVar("_Gpu")


def take_one(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Leaves this process one GPU of its host, whose memory it takes as it needs it.

    Before TensorFlow has looked for GPUs that is a matter of variables; afterwards it is told.
    """
    has_own = any(name in environ for name in _GIVEN_BY_SLURM)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        _tell(tensorflow, environ, None if has_own else local_rank)
        return
    gpus = visible(environ)
    if gpus and not has_own:
        environ[_VISIBLE] = _chosen(gpus, environ, local_rank)
    if gpus:
        environ.setdefault(_GROWTH, "true")


def _tell(tensorflow: Any, environ: MutableMapping[str, str], local_rank: int | None) -> None:
    config = tensorflow.config
    gpus = config.list_physical_devices("GPU")
    if not gpus:
        return
    if local_rank is not None:
        gpus = [_chosen(gpus, environ, local_rank)]
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


def visible(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that CUDA would show, which ends at the first invalid one."""
    given = environ.get(_VISIBLE)
    if given is None:
        found = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(i) for i in range(len(found))]
    names = [name.strip() for name in given.split(",")]
    invalid = (i for i, name in enumerate(names) if not name or name.startswith("-"))
    return names[: next(invalid, len(names))]
