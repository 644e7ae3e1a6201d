"""What the environment says of the launch: how many processes, started by whom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

TRACE_VARIABLE = "TNT_TRACE"
"""Names the file that training is to be recorded in, whatever the script says."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started, as far as its environment tells.

    Attributes:
        starter: What started it, for messages: "Open MPI's mpirun", "srun", ...
        size: Processes started together; `None` where the environment does not say.
    """

    starter: str
    size: int | None


# Most specific first: an mpiexec inside a Slurm job inherits Slurm's variables. The second name,
# where there is one, must be set as well. SLURM_NTASKS alone is no sign of several processes: an
# interactive allocation (`salloc`) and a batch script have it, with one plain `python` each.
_SIGNS: tuple[tuple[str, str, str | None], ...] = (
    ("tarantella", "TNT_NUM_RANKS", None),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", None),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", None),
    ("mpiexec (PMI)", "PMI_SIZE", "PMI_RANK"),
    ("mpiexec (PALS)", "PALS_SIZE", "PALS_RANKID"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpiexec", "MPI_LOCALNRANKS", None),
)
_SIZELESS: tuple[tuple[str, str], ...] = (
    ("a PMIx launcher", "PMIX_RANK"),
    ("mpiexec (PMI)", "PMI_RANK"),
    ("mpiexec (PALS)", "PALS_RANKID"),
)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Reads off the environment whether a launcher started this process, without touching MPI.

    Args:
        environ: The environment to read; `None` for that of this process.

    Returns:
        The launch, or `None` for a process that nobody started as one of several.
    """
    environ = os.environ if environ is None else environ
    for starter, size, companion in _SIGNS:
        value = environ.get(size, "")
        if value.isdecimal() and (companion is None or companion in environ):
            return Launch(starter, int(value))
    for starter, name in _SIZELESS:
        if name in environ:
            return Launch(starter, None)
    return None
