import os
import socket
import subprocess
import sys

import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.environment import detect_launch
from tarantella_pp.runtime.comm.waiting import Limits, Wakeup
from tests.helpers.message_cases import CASES, run_cases
from tests.helpers.mpi import PYTHONS, mpi_run


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_several_ranks(python: str) -> None:
    env = {"TNT_TIMEOUT": "20"}
    run = mpi_run(3, run_cases, list(CASES), timeout=100, env=env, python=python).check()
    assert run.results == [{}] * 3


@pytest.mark.parametrize(
    ("code", "started_by", "remedies"),
    [
        ("sys.modules['mpi4py'] = None", {"OMPI_COMM_WORLD_SIZE": "4"}, ["pip install"]),
        (
            "",
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
            ["srun --mpi=pmix", "tarantella -n", "mpiexec", "SLURM_STEP_NUM_TASKS is left over"],
        ),
    ],
)
def test_processes_that_cannot_meet_say_so(
    code: str, started_by: dict[str, str], remedies: list[str]
) -> None:
    """`test_package.py` has one process, which needs no MPI."""
    imports = "from tarantella_pp.runtime.comm.communicator import world"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}\n{imports}\nworld()"],
        capture_output=True, text=True, timeout=60, env={**os.environ, **started_by},
    )  # fmt: skip
    for part in ("LaunchError: 4 processes", *remedies):
        assert part in run.stderr


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("srun", 1)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, ("srun", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "1"}, ("Open MPI's mpirun", 3)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ("mpiexec (PMI)", 2)),
        ({"PMI_SIZE": "2"}, None),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, ("a launcher", None)),
        (
            {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "8"},
            ("Open MPI's mpirun", 8),
        ),
        # Left over from the job that started the shell; alone, each process would train all.
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "2", "PMI_RANK": "0"}, ("mpiexec (PMI)", 2)),
        (
            {"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
            ("srun", 4),
        ),
        ({"PMIX_RANK": "0"}, ("a launcher", None)),
        ({"TNT_NUM_RANKS": "2", "OMPI_COMM_WORLD_SIZE": "8"}, ("tarantella", 2)),
    ],
)
def test_launches_are_recognised(
    environ: dict[str, str], launch: tuple[str, int | None] | None
) -> None:
    found = detect_launch(environ)
    assert (found and (found.starter, found.size)) == launch
    assert found is None or found.variable in environ


def test_limits() -> None:
    assert Limits.from_environment({}) == Limits(60.0, 1800.0)
    assert Limits.from_environment({"TNT_WARN": "0", "TNT_TIMEOUT": "2.5"}) == Limits(0.0, 2.5)
    for text in ("soon", "-1", "nan", "inf"):
        with pytest.raises(ConfigurationError, match=f"TNT_TIMEOUT='{text}'"):
            Limits.from_environment({"TNT_TIMEOUT": text})


def test_a_bell_ends_a_sleep() -> None:
    here, there = bells = [Wakeup(), Wakeup()]
    for bell in bells:
        bell.connect([one.address for one in bells] + [[b"x", "elsewhere", [0]]])
    assert here.reaches(1)
    assert not here.reaches(2)
    assert not here.reaches(3)
    here.ring(2)
    assert not there.sleep(0.0)
    here.ring(1)
    here.ring(1)
    assert there.sleep(30.0)
    assert not there.sleep(0.0)


def test_a_rank_without_a_bell_just_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(socket, "socket", refuse)
    bell = Wakeup()
    bell.connect([[], bell.address])
    assert not bell.reaches(0)
    bell.ring(0)
    assert not bell.sleep(0.001)
