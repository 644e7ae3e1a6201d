"""Which MPI is taken, and the commands that start ranks with it."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tarantella_pp.cli import main
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import mpi_launchers
from tarantella_pp.launch.hosts import HostRanks

VERSIONS = {
    "openmpi": "mpiexec (Open MPI) 5.0.11",
    "mpich": "HYDRA build details:\n    Version: 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.13",
}


def install(prefix: pathlib.Path, name: str, answer: str, library: bool = False) -> str:
    """Puts a launcher into a directory that says of itself what is given."""
    path = prefix / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    if library:
        (prefix / "lib").mkdir(exist_ok=True)
        (prefix / "lib" / "libmpi.so.12").touch()
    return str(path)


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch, tmp_path):
    """Hides what is installed."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / "environment"))
    monkeypatch.setattr(mpi_launchers.site, "ENABLE_USER_SITE", False)


def test_the_wheel_of_this_environment_comes_first(tmp_path):
    install(tmp_path, "mpiexec", VERSIONS["openmpi"])
    wheel = install(tmp_path / "environment", "mpiexec", VERSIONS["mpich"], library=True)
    assert mpi_launchers.find_launcher() == mpi_launchers.Mpich(wheel)


def test_an_environment_without_a_library_does_not_count(tmp_path):
    site = install(tmp_path, "mpiexec", VERSIONS["openmpi"])
    install(tmp_path / "environment", "mpiexec", VERSIONS["mpich"])
    assert mpi_launchers.find_launcher() == mpi_launchers.OpenMpi(site)


def test_another_family_can_be_asked_for(tmp_path):
    site = install(tmp_path, "mpirun", VERSIONS["openmpi"])
    install(tmp_path / "environment", "mpiexec", VERSIONS["intel"], library=True)
    assert isinstance(mpi_launchers.find_launcher("mpich"), mpi_launchers.Mpich)
    assert mpi_launchers.find_launcher("openmpi") == mpi_launchers.OpenMpi(site)


def test_srun_is_taken_inside_an_allocation_only(tmp_path, monkeypatch):
    srun = install(tmp_path, "srun", "slurm 24.05")
    site = install(tmp_path, "mpiexec", VERSIONS["openmpi"])
    assert mpi_launchers.find_launcher() == mpi_launchers.OpenMpi(site)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert mpi_launchers.find_launcher() == mpi_launchers.Slurm(srun)
    wheel = install(tmp_path / "environment", "mpiexec", VERSIONS["mpich"], library=True)
    assert mpi_launchers.find_launcher() == mpi_launchers.Mpich(wheel)
    assert mpi_launchers.find_launcher("slurm") == mpi_launchers.Slurm(srun)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("auto", "`pip install mpich`"),
        ("mpich", "`pip install mpich`"),
        ("openmpi", "`pip install openmpi`"),
    ],
)
def test_no_mpi_is_an_error_with_remedies(name, remedy, tmp_path):
    install(tmp_path, "mpiexec", "a shell script of somebody")
    with pytest.raises(LaunchError, match="unknown MPI") as error:
        mpi_launchers.find_launcher(name)
    assert remedy in str(error.value)
    assert "module of your site" in str(error.value)


def test_no_slurm_is_not_mended_with_pip():
    with pytest.raises(LaunchError, match="no srun on PATH") as error:
        mpi_launchers.find_launcher("slurm")
    assert "pip" not in str(error.value)


def test_the_command_of_each_family(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    job = mpi_launchers.Job(
        *(("python", "w"), 3, 2), cores_per_rank=4, names=("A", "B"), label_output=True
    )
    assert mpi_launchers.Mpich("m").command(job) == ["m", "-n", "3", "-prepend-rank", "python", "w"]
    assert mpi_launchers.OpenMpi("m").command(job) == [
        *("m", "-n", "3", "--bind-to", "none", "--oversubscribe", "--output", "tag"),
        *("-x", "A", "-x", "B", "python", "w"),
    ]
    assert mpi_launchers.Slurm("s").command(job) == [
        *("s", "--ntasks=3", "--kill-on-bad-exit=1", "--export=ALL", "--cpus-per-task=4"),
        *("--label", "python", "w"),
    ]


@pytest.mark.parametrize(
    ("allocation", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "6"}, 3),  # those of a shell
        ({"SLURM_CPUS_ON_NODE": "8"}, 4),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_NNODES": "2"}, 8),
        ({}, 32),
    ],
)
def test_a_task_of_slurm_gets_its_share_of_the_cores(
    allocation, cores, tmp_path, monkeypatch, capsys
):
    install(tmp_path, "srun", "slurm 24.05")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name, value in {"SLURM_JOB_ID": "7", **allocation}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["-n", "2", "--dry-run", __file__]) == 0
    assert f" --cpus-per-task={cores} " in capsys.readouterr().out


def test_what_other_jobs_say_of_their_ranks_is_left_out():
    others = {
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_RANK": "0",
        "PMI_RANK": "0",
        "PMI_FD": "9",
        "MPI_LOCALRANKID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    ours = {
        "PATH": "/bin",
        "OMPI_MCA_btl": "self",
        "PMIX_MCA_gds": "hash",
        "SLURM_JOB_ID": "7",
        "SLURM_NODELIST": "n[1-2]",
        "MPI_HOME": "/opt/mpi",
        "PMI_MMAP_SYNC_WAIT_TIME": "9",
    }
    assert mpi_launchers.without_other_jobs({**others, **ours}) == ours


def test_hosts_are_passed_on(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    hosts = (HostRanks("a", 0, 2), HostRanks("b.c", 2, 1))
    job = mpi_launchers.Job(("w",), num_ranks=3, cores=2, hosts=hosts, options=("--o",))
    expected = ["m", "-n", "3", "-hosts", "a:2,b.c:1", "--o", "w"]
    assert mpi_launchers.Mpich("m").command(job) == expected
    assert mpi_launchers.OpenMpi("m").command(job) == [
        *("m", "-n", "3", "--bind-to", "none", "--allow-run-as-root"),
        *("--map-by", "slot", "--host", "a:2,b.c:1", "--o", "w"),
    ]
    with pytest.raises(ConfigurationError, match="--hostfile with s"):
        mpi_launchers.Slurm("s").command(job)


def test_the_remote_shell_is_that_of_the_user_of_the_environment_or_ssh():
    mpich, open_mpi = mpi_launchers.Mpich("m"), mpi_launchers.OpenMpi("m")
    for launcher in (mpich, open_mpi):
        assert launcher.remote_shell({}) == ["ssh"]
        given = launcher.environment("/d", "sh -p 22")
        assert launcher.remote_shell(given)[-2:] == ["-p", "22"]
        assert "sh -p 22" in given.values() or given["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 22"
    assert mpich.remote_shell({"HYDRA_LAUNCHER": "slurm"}) == []
    slurm = mpi_launchers.Slurm("s")
    assert slurm.remote_shell({}) == []
    with pytest.raises(ConfigurationError, match="--remote-shell='ssh'"):
        slurm.environment("/d", "ssh")


def test_a_dry_run_shows_command_and_environment_but_no_secret(tmp_path, monkeypatch, capsys):
    wheel = install(tmp_path / "environment", "mpiexec", VERSIONS["mpich"], library=True)
    monkeypatch.setenv("HUB_TOKEN", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    options = ["-n", "2", "-x", "HUB_TOKEN", "--log-level", "INFO", "--dry-run"]
    assert main.main([*options, "--", __file__, "--lr", "a b"]) == 0
    *variables, last = capsys.readouterr().out.splitlines()
    assert last == (
        f"{wheel} -n 2 {sys.executable} -m tarantella_pp.launch.worker {__file__} --lr 'a b'"
    )
    assert "TNT_LOG_LEVEL=INFO" in variables
    assert "HUB_TOKEN=<from -x>" in variables
    assert "s3cret" not in "".join(variables)
    assert not [line for line in variables if line.startswith("OMP_NUM_THREADS")]
