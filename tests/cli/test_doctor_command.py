"""`tarantella doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tarantella_pp.cli import doctor_command
from tarantella_pp.cli.doctor import probe_job
from tarantella_pp.errors import LaunchError
from tarantella_pp.partition.plan.hardware_spec import LAYER_KINDS, machine_of
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


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_what_ranks_compute_is_measured(python: str, tmp_path: Path) -> None:
    found = examined(python, "--save", str(tmp_path / "machine.json"))
    machine = machine_of(tmp_path / "machine.json")
    assert found["machine"] == msgspec.to_builtins(machine)
    assert machine.bandwidth == pytest.approx(1e9 * found["link"]["bandwidth_gb_per_s"])
    assert 1e9 < machine.flops_per_second < 1e16
    assert 1e8 < machine.memory_bandwidth < 1e13
    assert 1e-6 < machine.action_seconds < 0.1
    assert set(machine.layers) == set(LAYER_KINDS)
    for speed in machine.layers.values():
        for one in (speed.forward, speed.backward):
            assert one.flops_per_second > 1e7
            assert 0 <= one.start_seconds < 0.1


def test_a_machine_without_mpi_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI")

    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", find_launcher)
    parser = doctor_command.argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    assert doctor_command.run(parser.parse_args([])) == 1
    assert "Found no MPI" in capsys.readouterr().out


def test_a_job_that_fails_behind_its_messages_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = probe_job.Probed({(0, 1): probe_job.Link(1.0, 1.0)}, why="out of memory.")
    mpich = doctor_command.mpi_launchers.Mpich("mpiexec")
    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", lambda name: mpich)
    monkeypatch.setattr(doctor_command, "_measure", lambda name, compute: measured)
    parser = doctor_command.argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    file = tmp_path / "machine.json"
    assert doctor_command.run(parser.parse_args(["--json", "--save", str(file)])) == 1
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert "reached each other, but their job failed then: out of memory." in problem
    assert not file.exists()


def test_a_machine_without_tensorflow_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = probe_job.Probed({(0, 1): probe_job.Link(1.0, 1.0)})
    mpich = doctor_command.mpi_launchers.Mpich("mpiexec")
    monkeypatch.setattr(doctor_command.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", lambda name: mpich)
    monkeypatch.setattr(doctor_command, "_measure", lambda name, compute: measured)
    parser = doctor_command.argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    assert doctor_command.run(parser.parse_args([])) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "tensorflow is not installed: `pip install tensorflow-cpu`" in told
    assert "keras is not installed: `pip install keras`" in told
