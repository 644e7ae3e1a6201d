"""Variables of the environment: what starts a rank says in them, and what a rank is given."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.records import SIZE_VARIABLE

LOG_LEVEL_VARIABLE = "TNT_LOG_LEVEL"
LOG_ALL_VARIABLE = "TNT_LOG_ON_ALL_DEVICES"
OUTPUT_VARIABLE = "TNT_OUTPUT_ON_ALL_DEVICES"
# The second name must be set as well. SLURM_NTASKS alone is no sign of several processes: an
# interactive allocation (`salloc`) and a batch script have it, with one plain `python` each.
_SIGNS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    ("mpiexec (PMI)", "PMI_SIZE", "PMI_RANK"),
    ("mpiexec (PALS)", "PALS_SIZE", "PALS_RANKID"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpiexec", "MPI_LOCALNRANKS", "MPI_LOCALNRANKS"),
)
# Launchers that may not say how many ranks they start.
_SIZELESS = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID")
_FAMILIES = (
    "TNT_", "TF_", "OMP_", "KMP_", "MKL_", "KERAS_", "MALLOC_", "XLA_", "CUDA_", "NCCL_", "UCX_",
)  # fmt: skip
# What a user has set for a script; not every MPI hands it on to other hosts by itself.
_EVERYWHERE = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
LOG_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
# The library's log levels, with the level of TensorFlow's native log that goes with each.
LOG_LEVELS = {"DEBUG": "0", "INFO": "0", "WARNING": "1", "ERROR": "2"}


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started, as far as its environment tells."""

    starter: str  # what started it, for messages: "Open MPI's mpirun", "srun",
    size: int | None  # processes started together; `None` where the environment does not say
    variable: str  # the environment variable that says so

    def __str__(self) -> str:
        """Returns who started how many processes, and how that is known."""
        count = self.size or "Several"
        return f"{count} processes were started by {self.starter} ({self.variable} is set)"


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a number above 0 that a variable of the environment says, if it does."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None


def detect_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Reads off the environment whether a launcher started this process, without touching MPI."""
    ours = environ.get(SIZE_VARIABLE, "")
    if ours.isdecimal():
        return Launch("tarantella", int(ours), SIZE_VARIABLE)
    found = [
        Launch(starter, int(environ[name]), name)
        for starter, name, companion in _SIGNS
        if environ.get(name, "").isdecimal() and companion in environ
    ]
    found += [Launch("a launcher", None, name) for name in _SIZELESS if name in environ]
    # A shell inside a job passes on its own launcher's variables, too. The largest number counts:
    # MPI corrects one that is too large; with one too small each process would train alone.
    return max(found, key=lambda launch: launch.size or 0, default=None)


def rank_environment(log_level: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of others to set for every rank, on top of those given already."""
    defaults = {LOG_VARIABLE: LOG_LEVELS[log_level], **allocator_variables()}
    if platform.machine() == "x86_64":
        # Has TensorFlow multiply matrices with oneDNN, as it does if there is AVX-512. On cores
        # with AVX2 alone a product with the transpose of weights takes up to six times as long for
        # few rows without it; and its allocator leaves fewer gaps between tensors than glibc's.
        defaults["TF_ENABLE_ONEDNN_OPTS"] = "1"
    return {name: value for name, value in defaults.items() if name not in given}


def needed_elsewhere(given: Mapping[str, str]) -> list[str]:
    """Returns the variables that ranks on other hosts need as they are here."""
    return sorted(name for name in given if name in _EVERYWHERE or name.startswith(_FAMILIES))


def allocator_variables() -> dict[str, str]:
    """Returns the thresholds that keep freed tensors in the process."""
    # By default glibc gives freed blocks from 128 KiB on back, and the kernel clears each page
    # again at the next step: for tensors of 4 MB five times the cost of writing them.
    library, version = platform.libc_ver()
    if library != "glibc":
        return {}
    recent = tuple(map(int, version.split(".")[:2])) >= (2, 36)  # others ignore more than 32 MiB
    return {
        "MALLOC_MMAP_THRESHOLD_": str((256 if recent else 32) << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    }


def parse_exports(options: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `-x NAME` and `-x NAME=VALUE` options."""
    exports = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name.isidentifier():
            raise ConfigurationError(
                f"-x takes NAME or NAME=VALUE with a name of letters, digits and underscores. "
                f"Received: -x {option}"
            )
        if not equals and name not in given:
            raise ConfigurationError(
                f"-x {name}: no such variable in the environment; give NAME=VALUE."
            )
        exports[name] = value if equals else given[name]
    return exports


def seconds_from(environ: Mapping[str, str], name: str, default: float) -> float:
    """Returns a limit in seconds that a variable sets; 0 is for ever."""
    text = environ.get(name, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{name} is a number of seconds, 0 for no limit. Received: {name}={text!r}"
        )
    return seconds
