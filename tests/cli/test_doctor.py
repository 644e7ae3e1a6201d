"""`tarantella doctor`."""

from __future__ import annotations

import json

import pytest

from tarantella_pp.cli import doctor
from tarantella_pp.errors import LaunchError
from tests.cli.jobs import PYTHONS, tarantella


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_two_ranks_reach_each_other(python: str) -> None:
    with tarantella(python, "doctor", "--json") as job:
        result = job.result()
        assert not job.processes()
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["problem"] is None
    assert found["mpi"]["launcher"].endswith("mpiexec")
    assert found["link"]["latency_us"] > 0
    assert found["link"]["bandwidth_gb_per_s"] > 0
    assert found["versions"]["keras"].startswith("3.")


def test_a_machine_without_mpi_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI")

    monkeypatch.setattr(doctor.mpi, "find_launcher", find_launcher)
    parser = doctor.argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == 1
    assert "Found no MPI" in capsys.readouterr().out
