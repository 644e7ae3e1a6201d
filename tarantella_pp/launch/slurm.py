"""What Slurm says of its allocation, and how its srun starts ranks of the MPI in use."""

from __future__ import annotations

from collections.abc import Mapping

from tarantella_pp.launch.mpi_library import library_version, said

TYPE_VARIABLE = "SLURM_MPI_TYPE"
"""Tells srun the protocol by which ranks find each other, as its option `--mpi`."""
_PROTOCOLS = (("open mpi", "pmix"), ("intel", "pmi2"), ("mvapich", "pmi2"), ("mpich", "pmi2"))
"""What the version of an MPI library contains, and the protocol that it speaks with Slurm."""


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
    version = library_version().lower()
    if "cray" in version:  # it has one of its own, which is the default where it is installed
        return None
    wanted = next((protocol for name, protocol in _PROTOCOLS if name in version), None)
    return wanted if wanted in said([srun, "--mpi=list"]).split() else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a number above 0."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None
