"""What `tarantella doctor` runs elsewhere, with one line of JSON for each finding; and its start.

python -m tarantella_pp.cli.doctor_probe FOLDER         on a host: what it has
tarantella -n 2 -- -m tarantella_pp.cli.doctor_probe    on ranks: messages between each two
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tarantella_pp.runtime.comm.communicator import Communicator

# Bytes of messages: one for the latency, one of the size of an activation.
SMALL, LARGE = 8, 4 << 20
_MOST = {SMALL: 200, LARGE: 20}
# How long one size is tried: over a slow link, only a few times.
_ENOUGH_SECONDS = 0.4
# How long a rank may wait for a message: no link is so slow.
WAIT_SECONDS = 20.0
# What the launcher may take besides the job.
MORE_SECONDS = 100.0


class Messages(NamedTuple):
    """Pairs of ranks with latency and bandwidth, and what their job had to say if it failed."""

    links: dict[tuple[int, int], dict[str, float]]
    why: str = ""


def exchange_messages(options: Sequence[str], seconds: float) -> Messages:
    """Has ranks exchange messages in a job of its own, started as a user would."""
    run = [sys.executable, "-m", "tarantella_pp", "run", *options, "--timeout", f"{seconds:g}"]
    environment = {**os.environ, "TNT_TIMEOUT": f"{WAIT_SECONDS:g}", "TNT_WARN": "0"}
    command = [*run, "--", "-m", "tarantella_pp.cli.doctor_probe"]
    code, printed, said = ran(command, seconds + MORE_SECONDS, environment)
    links: dict[tuple[int, int], dict[str, float]] = {}
    for found in json_objects(printed):
        if "pair" in found:
            one, other = found.pop("pair")
            links[one, other] = found
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line.removeprefix("tarantella: ") for line in lines if line.startswith("tarantella: ")]
    why = " ".join(ours or lines[-1:]) or f"exit code {-9 if code is None else code}"
    return Messages(links, "" if code == 0 else why)


def ran(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Returns exit code, output and errors of a command; no code if it had to be killed."""
    # Files, not pipes: processes that a killed job or a shared ssh leaves behind hold pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, env=environment, timeout=seconds, check=False, **files
            ).returncode
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return code, texts[0], texts[1]


def json_objects(text: str) -> list[dict[str, Any]]:
    """Returns the lines that are objects of JSON; a shell may print others."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def main(arguments: Sequence[str]) -> None:
    """Prints what this host has, or how fast messages between ranks are."""
    if arguments:
        _tell(this_host(arguments[0]))
        return
    from tarantella_pp.runtime.comm.communicator import world

    group = world()
    for pair in itertools.combinations(range(group.size), 2):
        group.barrier()  # one pair after the other
        found = measure_pair(group, sum(pair) - group.rank) if group.rank in pair else {}
        found = group.allgather_json(found)[pair[0]]
        if group.rank == group.size - 1:  # at once: what comes next may never end
            _tell({"pair": pair, **found})


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def this_host(folder: str) -> dict[str, Any]:
    """Returns versions, cores and GPUs of this host, and its clock's time, read last."""
    from tarantella_pp.dependencies import version_of
    from tarantella_pp.launch.mpi_launchers import library_version
    from tarantella_pp.launch.resources import cores_of_node, visible_gpus

    return {
        "name": socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            "tarantella_pp": version_of("tarantella-pp"),
            "tensorflow": version_of("tensorflow") or version_of("tensorflow-cpu"),
            "keras": version_of("keras"),
            "MPI": library_version() or None,
        },
        "cores": cores_of_node(),
        "gpus": len(visible_gpus(os.environ)),
        "has_folder": os.path.isdir(folder),
        "time": time.time(),
    }


def measure_pair(group: Communicator, other: int) -> dict[str, float]:
    """Returns latency and bandwidth of messages to another rank; both must call it."""
    latency = _seconds_per_message(group, other, SMALL)
    seconds = _seconds_per_message(group, other, LARGE)
    return {"latency_us": latency * 1e6, "bandwidth_gb_per_s": LARGE / seconds / 1e9}


def _seconds_per_message(group: Communicator, other: int, size: int) -> float:
    """Returns the fastest of some ways there and back, halved."""
    # The lower rank decides how often: the first byte of a message says whether another one comes.
    import numpy as np

    from tarantella_pp.runtime.comm.communicator import TensorSpec

    # Receives are posted before the other side may send, so that no message waits in a buffer.
    data, spec = np.ones(size, np.uint8), TensorSpec((size,), "uint8")
    times: list[float] = []
    begin, goes_on = time.perf_counter(), True
    request = group.post_receive([spec], other, tag=0, label="link")
    while goes_on:
        start = time.perf_counter()
        if group.rank < other:
            goes_on = len(times) + 1 < _MOST[size] and start - begin < _ENOUGH_SECONDS
            data[0] = goes_on
            group.send([data], other, tag=0, label="link")
            request.wait()
        else:
            goes_on = bool(request.wait()[0][0])
        if goes_on:
            request = group.post_receive([spec], other, tag=0, label="link")
        if group.rank > other:
            group.send([data], other, tag=0, label="link")
        times.append((time.perf_counter() - start) / 2)
    group.flush()
    return min(times)  # a mean would measure what else the hosts do


if __name__ == "__main__":
    main(sys.argv[1:])
