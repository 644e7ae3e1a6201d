"""A job in which nothing goes wrong."""

import os

import pytest

from tests.helpers.jobs import PYTHONS, Job, mpiexec, tarantella

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("python", PYTHONS)]


# Of another MPI, and of its jobs.
STALE = {
    "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMI_RANK": "0",
    "PMI_SIZE": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip
NATIVE = "I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on."


@pytest.mark.parametrize(
    ("start", "environment", "native"),
    [
        (["run", "-np", "2", "hello.py"], STALE | {"TF_CPP_MIN_LOG_LEVEL": "0"}, [NATIVE] * 2),
        (["-n", "2", "--", "-m", "hello"], {"TF_CPP_MIN_LOG_LEVEL": "1"}, []),
    ],
)
def test_the_script_gets_its_arguments_and_one_rank_prints(python, start, environment, native):
    """And info of TensorFlow's native code is left out, unless it is asked for."""
    given = ["-n", "7", "--", "x y", ":", "::", "false"]
    result = tarantella(python, *start, *given, **environment).ends(0)
    first, second, _ = result.stdout.splitlines()
    assert first == "hello 1 2 -n 7 -- x y : :: false"
    assert second == "main __main__ scripts hello.py"
    assert sorted(result.stderr.splitlines()) == [*native, "warning told", "warning told"]


def test_all_ranks_of_a_hostfile_print_when_asked(python, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# this machine only\n{os.uname().nodename}:3\n")
    job = tarantella(python, "--hostfile", str(hosts), "--output-on-all-devices", "hello.py")
    lines = job.ends(0).stdout.splitlines()
    for rank in range(3):
        assert len([line for line in lines if line.endswith(f"hello {rank} 3")]) == 1
    assert not [line for line in lines if line.startswith("hello")]  # the rank comes first


def test_options_reach_the_ranks_which_all_log_when_asked(python, tmp_path):
    given = tmp_path / "input"
    given.write_text(10**6 * "x")
    options = [*("-x", "A=1", "-x", "GREETING=hi there", "-x", "B="), "--threads", "3", "-n", "2"]
    options += ["--no-gpu", "--log-level=INFO"]
    options += ["--python-interpreter", f"env C=4 {python} -O"]
    for more, infos in (([], [0]), (["--log-on-all-devices"], [0, 1])):
        with given.open() as file:
            result = tarantella(python, *options, *more, "hello.py", stdin=file).ends(0)
        line = result.stdout.splitlines()[2]
        assert line == "threads 3, 1 'hi there' '' '4', gpu -1, -O 1 read 1000000"
        assert result.stderr.count("warning told") == 2
        lines = sorted(line for line in result.stderr.splitlines() if "info told" in line)
        assert lines == [f"rank {rank}: info told" for rank in infos]


def test_descriptors_that_are_closed_are_none(python):
    """As they are where some daemons start jobs."""
    for closed in (">&-", "<&- >&- 2>&-"):
        result = Job("sh", "-c", f"{python} -m tarantella_pp -n 2 hello.py {closed}").ends(0)
        assert "tarantella:" not in result.stderr


@pytest.mark.parametrize("start", [tarantella, mpiexec])
def test_each_rank_takes_a_gpu(python, start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    given = ["-n", "2", "--output-on-all-devices"] if start is tarantella else [2]
    result = start(python, *given, "share.py").ends(0)
    for rank, gpu in enumerate(["5", "6"]):
        assert f"rank {rank} takes {gpu}, growth true, cores " in result.stdout
