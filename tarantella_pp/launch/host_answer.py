"""What a host says of itself before a job starts on it, as JSON in one line.

Called with the addresses and the port of the launcher, it tries to reach that, too; with the
launcher's folder behind them, it says all that `tarantella doctor` compares.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from tarantella_pp.dependencies import version_of
from tarantella_pp.launch.channel.joining import CONNECT_SECONDS, Whereabouts
from tarantella_pp.launch.guard import core_binding, gpus
from tarantella_pp.launch.mpi_library import library_version


def main(arguments: Sequence[str]) -> None:
    """Prints the answer."""
    launcher = Whereabouts.parse(arguments[0], "")
    answer = {"name": socket.gethostname(), "reasons": _obstacles(launcher)}
    if arguments[1:]:
        answer |= examined(arguments[1])
    sys.stdout.write(f"{json.dumps(answer)}\n")


def examined(folder: str) -> dict[str, Any]:
    """Returns versions, cores and GPUs of this host, and its clock's time, read last."""
    return {
        "versions": {
            "python": platform.python_version(),
            "tarantella_pp": version_of("tarantella-pp"),
            "tensorflow": version_of("tensorflow") or version_of("tensorflow-cpu"),
            "keras": version_of("keras"),
            "MPI": library_version() or None,
        },
        "cores": core_binding.cores_of_node(),
        "gpus": len(gpus.visible(os.environ)),
        "has_folder": os.path.isdir(folder),
        "time": time.time(),
    }


def _obstacles(launcher: Whereabouts) -> list[str]:
    """Returns why the launcher cannot be reached from here; nothing if it can."""
    reasons = []
    for address in launcher.addresses:
        try:
            socket.create_connection((address, launcher.port), CONNECT_SECONDS).close()
        except OSError as error:
            reasons.append(f"{address} port {launcher.port}: {error.strerror or error}")
        else:
            return []
    return reasons


if __name__ == "__main__":
    main(sys.argv[1:])
