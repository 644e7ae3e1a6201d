"""`tarantella doctor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tarantella_pp.cli import doctor_command, doctor_probe
from tarantella_pp.errors import LaunchError
from tests.helpers.commands import Command
from tests.helpers.jobs import PYTHONS, tarantella


def examined(python: str, *options: str) -> dict[str, Any]:
    """Returns what the command says as JSON."""
    with tarantella(python, "doctor", "--json", *options) as job:
        result = job.result()
        assert not job.processes()
    assert result.code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["problem"] is None
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_two_ranks_reach_each_other(python: str) -> None:
    found = examined(python)
    assert found["mpi"]["launcher"].endswith("mpiexec")
    assert found["link"]["latency_us"] > 0
    assert found["link"]["bandwidth_gb_per_s"] > 0
    assert found["versions"]["keras"].startswith("3.")


def test_a_machine_without_mpi_is_reported(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI")

    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", find_launcher)
    assert command("doctor") == 1
    assert "Found no MPI" in command.stdout


LINE = '{"pair": [0, 1], "latency_us": 2.0, "bandwidth_gb_per_s": 3.0}'


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Has a shell script stand for the launcher of ranks."""

    def stand_in(script: str) -> None:
        path = tmp_path / "launcher"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        mpich = doctor_command.mpi_launchers.Mpich("mpiexec")
        monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", lambda name: mpich)
        monkeypatch.setattr(sys, "executable", str(path))

    return stand_in


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"echo noise; echo '{LINE}'; echo tarantella: out of memory. >&2; exit 1",
         "Two ranks reached each other, but their job failed then: out of memory."),
        ("echo 'some noise' >&2; echo 'tarantella: no way' >&2; exit 3",
         "did not reach each other: no way."),
        ("exit 3", "did not reach each other: exit code 3."),
    ],
)  # fmt: skip
def test_what_the_launcher_says_is_the_reason(
    launcher: Callable[[str], None], command: Command, script: str, told: str
) -> None:
    launcher(script)
    assert command("doctor", "--json") == 1
    assert told in json.loads(command.stdout)["problem"]


def test_a_launcher_that_does_not_end_is_killed_and_what_it_said_kept(
    launcher: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(f"trap '' TERM; echo '{LINE}'; while :; do sleep 0.1; done")
    monkeypatch.setattr(doctor_probe, "MORE_SECONDS", 0.5)
    found = doctor_probe.exchange_messages([], 0.5)
    assert found == ({(0, 1): {"latency_us": 2.0, "bandwidth_gb_per_s": 3.0}}, "exit code -9")


def test_a_machine_without_tensorflow_is_reported(
    launcher: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(f"echo '{LINE}'")
    monkeypatch.setattr(doctor_command.util, "find_spec", lambda name: None)
    problem = doctor_command.examine()["problem"]
    assert "tensorflow is not installed: `pip install tensorflow-cpu`" in problem
    assert "keras is not installed: `pip install keras`" in problem


def test_options_of_hosts_need_hosts(command: Command) -> None:
    assert command("doctor", "--remote-shell", "rsh") == 2
    assert "--remote-shell is for the hosts of --hostfile, which is missing" in command.stderr
