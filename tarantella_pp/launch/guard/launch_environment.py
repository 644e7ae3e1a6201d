"""What the environment says of the launch: how many processes, started by whom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tarantella_pp.launch.channel.rank_records import SIZE_VARIABLE

TRACE_VARIABLE = "TNT_TRACE"
"""Names the file that training is to be recorded in, whatever the script says."""
FUSION_VARIABLE = "TNT_FUSION_THRESHOLD"
"""Says how many bytes of gradients replicas sum at a time, where the script does not."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started, as far as its environment tells.

    Attributes:
        starter: What started it, for messages: "Open MPI's mpirun", "srun", ...
        size: Processes started together; `None` where the environment does not say.
        variable: The environment variable that says so.
    """

    starter: str
    size: int | None
    variable: str

    def __str__(self) -> str:
        """Returns who started how many processes, and how that is known."""
        if self.size is None:
            return f"Several processes were started by {self.starter} ({self.variable} is set)"
        return f"{self.size} processes were started by {self.starter} ({self.variable}={self.size})"


# The second name, where there is one, must be set as well. SLURM_NTASKS alone is no sign of
# several processes: an interactive allocation (`salloc`) and a batch script have it, with one plain
# `python` each.
_SIGNS: tuple[tuple[str, str, str | None], ...] = (
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


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a number above 0 that a variable of the environment says, if it does."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Reads off the environment whether a launcher started this process, without touching MPI.

    A shell inside a job passes on the variables of its own launcher, beside those of the launcher
    in use. The largest number counts: MPI itself corrects one that is too large; with one that is
    too small each process would train alone.
    """
    environ = os.environ if environ is None else environ
    ours = environ.get(SIZE_VARIABLE, "")
    if ours.isdecimal():
        return Launch("tarantella", int(ours), SIZE_VARIABLE)
    found = [
        Launch(starter, int(environ[name]), name)
        for starter, name, companion in _SIGNS
        if environ.get(name, "").isdecimal() and (companion is None or companion in environ)
    ]
    if found:
        return max(found, key=lambda launch: launch.size or 0)
    return next(
        (Launch(starter, None, name) for starter, name in _SIZELESS if name in environ), None
    )
