"""The MPI library that mpi4py loads, without starting MPI in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

LIMIT_SECONDS = 60.0
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


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
