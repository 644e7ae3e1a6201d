"""Jobs inside an allocation of Slurm, whose srun is acted by a script."""

import contextlib
import os
import re
import signal

import psutil
import pytest

from tests.helpers.jobs import PYTHONS, ROOT, Job, executable, slurm_allocation, tarantella


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_tasks_and_cores_are_those_of_the_slurm_allocation(python, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    calls = tmp_path / "calls"
    given = slurm_allocation(python, calls)
    result = tarantella(python, "--mpi", "slurm", "--", "hello.py", "a", **given).ends(0)
    assert re.match("hello 1 2 a\n.*\nthreads 3, ", result.stdout)
    told = calls.read_text()
    assert re.match("SLURM_MPI_TYPE=pm(i2|ix) --ntasks=2 --kill-on-bad-exit=1 --export=ALL ", told)
    assert " --cpus-per-task=3 " in told


OWN_STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9",
    "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0",
}  # fmt: skip
"""What a shell finds that `srun --pty` has started."""


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_a_step_begins_beside_that_of_the_shell_and_a_rank_that_fails_is_named(python, tmp_path):
    """srun would wait for the shell to end, or bind all ranks to its cores."""
    given = slurm_allocation(python, tmp_path / "calls", **OWN_STEP)
    job = tarantella(python, "-n", "2", "--mpi=slurm", "--", "fault.py", "_exit5", "recv", **given)
    cause = "failed first: its process ended with exit code 5"
    job.ends(5, "tarantella: rank 1 of 2 on host ", cause)


def signal_tasks(job: Job) -> None:
    """Sends SIGTERM to all tasks and not to the launcher, as Slurm does."""
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            if (
                "tarantella_pp.launch.worker" in process.cmdline()
                and "mpiexec" not in process.name()
            ):
                process.send_signal(signal.SIGTERM)


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS[:1])  # Open MPI kills what it is to forward signals to
def test_preempted_tasks_end_with_75_and_the_script_of_the_examples_puts_them_back_into_the_queue(
    python, tmp_path
):
    """A run ends with a checkpoint then, from which it goes on as `test_checkpoints.py` shows."""
    command = f'exec {python} -m tarantella_pp --mpi=slurm "$@"'
    for name, text in (("tarantella", command), ("scontrol", f'echo "$@" >> {tmp_path}/queue')):
        executable(tmp_path / name, f"#!/bin/sh\n{text}\n")
    given = slurm_allocation(python, tmp_path / "calls")
    given["PATH"] = os.pathsep.join([str(tmp_path), given["PATH"]])
    with Job("bash", str(ROOT / "examples" / "slurm.sbatch"), "stopped.py", **given) as job:
        job.wait_until_ready()
        signal_tasks(job)
        result = job.ends(75, "tarantella: the job was stopped by SIGTERM")
    assert (tmp_path / "queue").read_text() == "requeue 7\n"
    assert "failed first" not in result.stderr
