"""What Slurm says of its allocation, and how its srun starts ranks of the MPI in use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

TYPE_VARIABLE = "SLURM_MPI_TYPE"
"""Tells srun the protocol by which ranks find each other, as its option `--mpi`."""
_LIMIT_SECONDS = 60.0
_PROTOCOLS = (("open mpi", "pmix"), ("intel", "pmi2"), ("mvapich", "pmi2"), ("mpich", "pmi2"))
"""What the version of an MPI library contains, and the protocol that it speaks with Slurm."""
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def nodes(environ: Mapping[str, str]) -> int:
    """Returns the number of hosts of the allocation; 1 without one."""
    return _number(environ, "SLURM_NNODES") or 1


def tasks(environ: Mapping[str, str]) -> int | None:
    """Returns the number of ranks that the allocation was asked for, where it says so."""
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    return _number(environ, "SLURM_NTASKS") or (per_node and per_node * nodes(environ))


def mpi_type(srun: str) -> str | None:
    """Returns the protocol that the MPI of mpi4py speaks, if this Slurm has it.

    With another one every rank would think that it is alone. None leaves the choice to Slurm, which
    its administrators have made.

    Args:
        srun: Path of srun.
    """
    version = _said([sys.executable, "-c", _LIBRARY])
    if "cray" in version:  # it has one of its own, which is the default where it is installed
        return None
    wanted = next((protocol for name, protocol in _PROTOCOLS if name in version), None)
    return wanted if wanted in _said([srun, "--mpi=list"]).split() else None


def _said(command: list[str]) -> str:
    """Returns what a command prints; nothing if it cannot."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (answer.stdout + answer.stderr).lower()


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a number above 0."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None
