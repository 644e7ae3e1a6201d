"""What Slurm says of its allocation, and how its srun starts ranks of the MPI in use."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tarantella_pp.launch.environment import number_of

TYPE_VARIABLE = "SLURM_MPI_TYPE"
"""Tells srun the protocol by which ranks find each other, as its option `--mpi`."""
OVERLAP_VARIABLE = "SLURM_OVERLAP"
"""Has a step share what others have, as srun's option `--overlap` since Slurm 20.11."""
_OF_A_TASK = re.compile(r"SLURM_(CPU|MEM)_BIND")
"""Variables in which srun tells a task its cores; another srun takes them for options."""
_PROTOCOLS = (("open mpi", "pmix"), ("intel", "pmi2"), ("mvapich", "pmi2"), ("mpich", "pmi2"))
"""What the version of an MPI library contains, and the protocol that it speaks with Slurm."""
LIMIT_SECONDS = 60.0
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def beside_own_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which a step can begin while that of this process goes on.

    In a shell that `srun --pty` has started, all that was allocated is the shell's, and another
    srun, which MPICH's launcher calls as well, would wait until the shell is left.
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return dict(environ)
    kept = {name: value for name, value in environ.items() if not _OF_A_TASK.match(name)}
    return {OVERLAP_VARIABLE: "1", **kept}


def nodes(environ: Mapping[str, str]) -> int:
    """Returns the number of hosts of the allocation; 1 without one."""
    return number_of(environ, "SLURM_NNODES") or number_of(environ, "SLURM_JOB_NUM_NODES") or 1


def tasks(environ: Mapping[str, str]) -> int | None:
    """Returns the number of ranks that the allocation was asked for, where it says so."""
    per_node = number_of(environ, "SLURM_NTASKS_PER_NODE")
    return number_of(environ, "SLURM_NTASKS") or (per_node and per_node * nodes(environ))


def most_tasks(environ: Mapping[str, str], num_ranks: int) -> int | None:
    """Returns the most ranks of a host, where the allocation says how they are dealt out."""
    parts = environ.get("SLURM_TASKS_PER_NODE", "").split(",")
    found = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip()) for part in parts]
    each = [(int(one[1]), int(one[2] or 1)) for one in found if one is not None]
    alike = len(each) == len(parts) and sum(n * hosts for n, hosts in each) == num_ranks
    return max(n for n, _ in each) if alike else None


def mpi_type(srun: str) -> str | None:
    """Returns the protocol that the MPI of mpi4py speaks, if this Slurm has it.

    With another one every rank would think that it is alone. None leaves the choice to Slurm, which
    its administrators have made.
    """
    version = library_version().lower()
    if "cray" in version:  # it has one of its own, which is the default where it is installed
        return None
    wanted = next((protocol for name, protocol in _PROTOCOLS if name in version), None)
    return wanted if wanted in said([srun, "--mpi=list"]).split() else None


def library_version() -> str:
    """Returns its name and version, as in `MPICH 5.0.2`; nothing where there is none."""
    first = said([sys.executable, "-c", _LIBRARY], errors=False).partition("\n")[0]
    return " ".join(first.partition(",")[0].replace("Version:", "").split())


def said(command: Sequence[str], *, errors: bool = True) -> str:
    """Returns what a command prints; nothing if it cannot be run."""
    try:
        answer = subprocess.run(
            list(command), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + (answer.stderr if errors else "")
