"""The job that measures, seen from outside: started as a user would, and ended in time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tarantella_pp.launch.prctl import die_with_parent
from tarantella_pp.partition.plan.hardware_spec import CORE, HardwareSpec, LayerSpeed, PassSpeed

_MODULE = "tarantella_pp.cli.doctor.machine_probe"
WAIT_SECONDS = 20.0
"""How long a rank may wait for a message: no link is so slow."""
MORE_SECONDS = 100.0
"""What the launcher may take besides the job: hosts have a minute to answer."""
_END_SECONDS = 10.0
_LEAST = 1e-18
"""The least seconds of a floating point operation: noise may leave none."""


@dataclass(frozen=True, slots=True)
class Link:
    """What messages between two ranks need.

    Attributes:
        latency_us: Microseconds of the smallest message.
        bandwidth_gb_per_s: Gigabytes per second of a large one, in one direction.
    """

    latency_us: float
    bandwidth_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Probed:
    """What a job has measured before it ended.

    Attributes:
        links: Pairs of ranks, with what messages between them need.
        rank: What the slowest rank does, as `compute_probes` found it; empty if it was not
            measured.
        why: What the job had to say; empty if it ended well.
    """

    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    rank: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def probe(
    options: Sequence[str], ranks: Sequence[int], seconds: float, *, compute: bool = False
) -> Probed:
    """Measures the links between ranks in a job of its own."""
    script = ["-m", _MODULE, ",".join(map(str, ranks)), *(["compute"] if compute else [])]
    run = [sys.executable, "-m", "tarantella_pp", "run", *options, "--timeout", f"{seconds:g}"]
    longest = seconds if compute else WAIT_SECONDS
    environment = {**os.environ, "TNT_TIMEOUT": f"{longest:g}", "TNT_WARN": "0"}
    # Files, since what is left of a job that was killed could hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        code = _exit_code([*run, "--", *script], environment, out, errors, seconds + MORE_SECONDS)
        printed, said = (_text(file) for file in (out, errors))
    found = [_object(line) for line in printed.splitlines()]
    return Probed(
        {(pair[0], pair[1]): Link(**rest) for pair, rest in map(_of_pair, found) if pair},
        next((entry["rank"] for entry in found if "rank" in entry), {}),
        "" if code == 0 else _reason(said) or f"exit code {code}",
    )


def machine_of_ranks(rank: Mapping[str, Any], links: Sequence[Link]) -> HardwareSpec:
    """Returns the machine that was measured, whose link is the slowest of all."""
    layers = {
        name: LayerSpeed(_pass_speed(*kind["forward"]), _pass_speed(*kind["backward"]))
        for name, kind in rank["layers"].items()
    }
    product = layers.get("product")
    return HardwareSpec(
        flops_per_second=rank["flops_per_second"],
        bandwidth=1e9 * min(link.bandwidth_gb_per_s for link in links),
        latency=1e-6 * max(link.latency_us for link in links),
        action_seconds=rank["action_seconds"],
        memory_bandwidth=rank["memory_bandwidth"],
        split_factor=1.0 if rank["on_gpu"] else CORE.split_factor,
        weight_bandwidth=None if product is None else product.forward.weight_bandwidth,
        **layers,
    )


def _pass_speed(start: float, flop: float, byte: float) -> PassSpeed:
    """Returns what layers of a kind do, from seconds of a start, a FLOP and a byte of weights."""
    return PassSpeed(1 / max(flop, _LEAST), start, 1 / byte if byte > _LEAST else None)


def _exit_code(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    errors: IO[bytes],
    seconds: float,
) -> int:
    """Runs the launcher, and ends it after some time: gently first, as it has ranks to end."""
    parent = os.getpid()
    process = subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        preexec_fn=lambda: die_with_parent(parent),
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
    return -1 if process.returncode is None else process.returncode


def _of_pair(entry: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, float]]:
    """Returns the pair of ranks and what was measured; no pair for another entry."""
    rest = {name: value for name, value in entry.items() if name != "pair"}
    return tuple(entry.get("pair", ())), rest


def _object(line: str) -> dict[str, Any]:
    """Returns a line that is an object of JSON; others are of somebody else."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(said: str) -> str:
    """Returns what the launcher says of the end of the job, or else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line.removeprefix("tarantella: ") for line in lines if line.startswith("tarantella: ")]
    return " ".join(ours or lines[-1:])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
