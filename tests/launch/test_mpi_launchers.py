"""Which MPI is taken, and the commands that start ranks with it."""

import os
import pathlib
import subprocess
import sys

import pytest

from tarantella_pp.cli import main
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import mpi_launchers
from tarantella_pp.launch.hosts import HostRanks
from tarantella_pp.launch.mpi_launchers import Mpich, OpenMpi, Slurm, find_launcher

OPEN_MPI = "mpiexec (Open MPI) 5.0.11"
MPICH = "HYDRA build details:\n    Version: 5.0.2"


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
def own(monkeypatch, tmp_path):
    """Hides what is installed; the folder of this Python's environment."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / "environment"))
    monkeypatch.setattr(mpi_launchers.site, "ENABLE_USER_SITE", False)
    return tmp_path / "environment"


def test_the_mpi_of_this_environment_comes_first_if_it_has_a_library(tmp_path, own):
    site = install(tmp_path, "mpirun", OPEN_MPI)
    install(own, "mpiexec", MPICH)
    assert find_launcher() == OpenMpi(site)
    wheel = install(own, "mpiexec", "Intel(R) MPI Library for Linux* OS, 2021.13", library=True)
    assert find_launcher() == find_launcher("mpich") == Mpich(wheel)
    assert find_launcher("openmpi") == OpenMpi(site)


def test_srun_is_taken_inside_an_allocation_only(tmp_path, own, monkeypatch):
    srun = install(tmp_path, "srun", "slurm 24.05")
    site = install(tmp_path, "mpiexec", OPEN_MPI)
    assert find_launcher() == OpenMpi(site)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_launcher() == Slurm(srun)
    wheel = install(own, "mpiexec", MPICH, library=True)
    assert find_launcher() == Mpich(wheel)
    assert find_launcher("slurm") == Slurm(srun)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("auto", "unknown MPI.*`pip install mpich`.*module of your site"),
        ("mpich", "`pip install mpich`"),
        ("openmpi", "`pip install openmpi`"),
        ("slurm", r"no srun on PATH\. Start the job on a machine of the cluster"),
    ],
)
def test_no_mpi_is_an_error_with_remedies(name, told, tmp_path):
    install(tmp_path, "mpiexec", "a shell script of somebody")
    with pytest.raises(LaunchError, match=told):
        find_launcher(name)


def test_the_command_of_each_family(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    job = mpi_launchers.Job(
        ("python", "w"), 3, cores_per_rank=4, names=("A", "B"), label_output=True, options=("--o",)
    )
    tail = ["--o", "python", "w"]
    assert Mpich("m").command(job) == ["m", "-n", "3", "-prepend-rank", *tail]
    assert OpenMpi("m").command(job) == [
        *("m", "-n", "3", "--bind-to", "none", "--oversubscribe", "--output", "tag"),
        *("-x", "A", "-x", "B", *tail),
    ]
    assert Slurm("s").command(job) == [
        *("s", "--ntasks=3", "--kill-on-bad-exit=1", "--export=ALL", "--cpus-per-task=4"),
        *("--label", *tail),
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    job = mpi_launchers.Job(("w",), 3, hosts=(HostRanks("a", range(2)), HostRanks("b.c", [2])))
    assert Mpich("m").command(job) == ["m", "-n", "3", "-hosts", "a:2,b.c:1", "w"]
    assert OpenMpi("m").command(job) == [
        *("m", "-n", "3", "--bind-to", "none", "--allow-run-as-root"),
        *("--map-by", "slot", "--host", "a:2,b.c:1", "w"),
    ]
    with pytest.raises(ConfigurationError, match="--hostfile with s"):
        Slurm("s").command(job)


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


SSH = "-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=20 -oServerAliveCountMax=3"


@pytest.mark.parametrize(
    ("environ", "given", "mpich", "open_mpi"),
    [
        ({}, None, (None, SSH), (None, SSH)),
        ({"HYDRA_LAUNCHER": "slurm", "PRTE_MCA_plm_ssh_agent": "rsh"}, None,
         (None, None), (None, None)),
        ({"HYDRA_LAUNCHER_EXTRA_ARGS": "-v", "PRTE_MCA_plm_ssh_args": "-v"}, None,
         (None, f"-v {SSH}"), (None, f"-v {SSH}")),
        ({}, "ssh -p 22", ("ssh", f"-p 22 {SSH}"), ("ssh -p 22", SSH)),
        ({}, "sh -p 22", ("sh", "-p 22"), ("sh -p 22", None)),
    ],
)  # fmt: skip
def test_the_remote_shell_is_the_users_the_environments_or_ssh(
    environ, given, mpich, open_mpi, monkeypatch
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = Mpich("m").environment("/d", given)
    names = ("HYDRA_LAUNCHER_EXEC", "HYDRA_LAUNCHER_EXTRA_ARGS")
    assert tuple(map(found.get, names)) == mpich
    found = OpenMpi("m").environment("/d", given)
    names = ("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_args")
    assert tuple(map(found.get, names)) == open_mpi
    assert found["PRTE_MCA_prte_local_tmpdir_base"] == "/d"
    with pytest.raises(ConfigurationError, match="--remote-shell='ssh'"):
        Slurm("s").environment("/d", "ssh")


def test_a_dry_run_shows_command_and_environment_but_no_secret(own, monkeypatch, capsys):
    wheel = install(own, "mpiexec", MPICH, library=True)
    monkeypatch.setenv("HUB_TOKEN", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    options = ["-np", "2", "-x", "HUB_TOKEN", "--log-level", "INFO", "--trace", "t", "--dry-run"]
    assert main.main([*options, "--", __file__, "--lr", "a b"]) == 0
    *variables, last = capsys.readouterr().out.splitlines()
    assert last == (
        f"{wheel} -n 2 {sys.executable} -m tarantella_pp.launch.worker {__file__} --lr 'a b'"
    )
    assert {"TNT_LOG_LEVEL=INFO", "HUB_TOKEN=<from -x>", f"TNT_TRACE={os.getcwd()}/t"} <= {
        *variables
    }
    assert "s3cret" not in "".join(variables)
    assert not [line for line in variables if line.startswith("OMP_NUM_THREADS")]


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "5"}, 5),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "3"}, 6),
        ({"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "2(x3)"}, None),
    ],
)
def test_tasks_are_those_asked_for(given, tasks):
    assert mpi_launchers.slurm_tasks(given) == tasks


@pytest.mark.parametrize(
    ("version", "listed", "protocol"),
    [
        ("Open MPI v5.0.11", "none pmi2 pmix", "pmix"),
        ("Open MPI v5.0.11", "none pmi2", None),
        ("MPICH Version: 5.0.2", "cray_shasta none pmi2", "pmi2"),
        ("Intel(R) MPI Library 2021", "none pmi2", "pmi2"),
        ("CRAY MPICH version 8", "cray_shasta none pmi2", None),
        ("", "none pmi2", None),
    ],
)
def test_the_protocol_is_that_of_the_mpi(version, listed, protocol, monkeypatch):
    def run(command: list[str], **unused: object) -> subprocess.CompletedProcess[str]:
        text = version if command[0] == sys.executable else listed.replace(" ", "\n\t")
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(mpi_launchers.subprocess, "run", run)
    assert mpi_launchers.mpi_type("srun") == protocol
