"""The commands of "From a laptop to a cluster" are run: here, on two hosts, under Slurm."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, ROOT, Job, Result
from tests.helpers.mpi import find_mpiexec, mpi_run

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
LIMIT_SECONDS = 200.0
HOSTS = ("node-1", "node-2")
ALONE = ("On a laptop", "On one node")
ON_HOSTS = ("On several hosts", "When it is slow", "When a host dies")
IN_SLURM = ("With Slurm",)
TRAINED = "When it is slow"
"""The section that trains, for its trace; in others it is the launcher that matters."""
Run = Callable[[str], Result]
pytestmark = pytest.mark.mpi


def blocks(language: str) -> dict[str, list[str]]:
    """Returns the blocks of each section in a language."""
    sections = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)
    found = {
        title: re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {title: texts for title, texts in found.items() if texts}


COMMANDS = {title: "".join(texts).splitlines() for title, texts in blocks("bash").items()}
HOSTFILE, SHOWN = blocks("text")["On several hosts"]


# In place of the example.
STUB = """
import os, sys

def build_model():
    import keras
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])

def train():
    import numpy as np, tarantella_pp as tnt
    model = tnt.PipelineModel(build_model(), num_stages=2, num_micro_batches=1)
    model.compile("sgd", "mse")
    model.fit(np.ones((1, 2)), np.ones((1, 1)), verbose=0)

if __name__ == "__main__":
    from mpi4py.MPI import COMM_WORLD as world
    if "--kill-at" in sys.argv and world.rank == 1:
        os.kill(os.getpid(), 9)
    world.barrier()
    for epoch in range(4 * (world.rank == world.size - 1)):
        print("loss:", epoch)
"""


def write_checkpoint(folder: str) -> None:
    """Leaves what the example would, of four epochs of four steps."""
    import keras
    import numpy as np

    import tarantella_pp as tnt

    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = tnt.PipelineModel(plain, num_stages=1, num_micro_batches=1)
    model.compile("sgd", "mse")
    x, own = np.ones((4, 2)), tnt.callbacks.Checkpoint(folder)
    model.fit(x, x[:, :1], batch_size=1, epochs=4, verbose=0, callbacks=[own])


def runs(
    python: str, folder: Path, *inside: str, title: str, hosts: str = "", **environment: str
) -> Run:
    """Returns what runs a command in a folder with the examples, as a user would."""
    (folder / "examples").mkdir()
    (folder / "examples" / "resume.py").write_text(STUB + "    train()\n" * (title == TRAINED))
    shutil.copy(ROOT / "examples" / "slurm.sbatch", folder / "examples")
    (folder / "hosts").write_text(hosts)
    program(folder, "python", f'exec {python} "$@"')
    path = os.pathsep.join([str(folder / "bin"), environment.pop("PATH", os.environ["PATH"])])

    def run(command: str) -> Result:
        there = f"cd {shlex.quote(str(folder))} && {command}"
        with Job(*inside, "sh", "-c", there, **{**environment, "PATH": path}) as job:
            return job.result(LIMIT_SECONDS)

    return run


def program(folder: Path, name: str, text: str) -> None:
    """Puts a program on the path."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / name).chmod(0o700)


def check(title: str, run: Run) -> dict[str, Result]:
    """Runs the commands of a section, one after the other, and returns how each has ended."""
    results = {}
    for command in COMMANDS[title]:
        result = results[command] = run(command)
        expected = re.search(r"# ends with (\d+)$", command)
        assert result.code == (int(expected[1]) if expected else 0), (command, result)
    return results


@contextlib.contextmanager
def two_hosts(python: str, folder: Path, title: str) -> Iterator[Run]:
    """What runs a command on the first of two hosts, which reaches the other with `ssh`."""
    # But for the section about them, one rank of each host shows as much.
    hosts = HOSTFILE if title == "On several hosts" else HOSTFILE.replace(":2", ":1")
    own, shared = folder / "network", folder / "shared"
    own.mkdir()
    shared.mkdir()
    with network_hosts.network(2, own, HOSTS) as made:
        first = made.hosts[0]
        given = {"UCX_TLS": "tcp,self", "TMPDIR": str(first.tmp)}
        program(shared, "tarantella", f'exec {python} -m tarantella_pp "$@"')
        program(shared, "ssh", f'exec {made.remote_shell} "$@"')
        yield runs(python, shared, *first.inside(), title=title, hosts=hosts, **given)
        assert [host.leftovers() for host in made.hosts] == [[], []]


def test_every_section_with_commands_is_run() -> None:
    assert set(COMMANDS) == {*ALONE, *ON_HOSTS, *IN_SLURM}
    assert sum(map(len, COMMANDS.values())) > 10
    lines = [line for commands in COMMANDS.values() for line in commands]
    programs = {re.sub(r"^[A-Z_]+=\S+ ", "", line).split()[0] for line in lines}
    assert programs == {"python", "tarantella", "sbatch", "salloc"}


@pytest.mark.slow
@pytest.mark.parametrize("title", ALONE)
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_one_host(python: str, title: str, tmp_path: Path) -> None:
    program(tmp_path, "tarantella", f'exec {python} -m tarantella_pp "$@"')
    results = check(title, runs(python, tmp_path, title=title))
    told = [re.findall("^loss: .*", result.stdout, re.MULTILINE) for result in results.values()]
    assert len([losses for losses in told if len(losses) == 4]) == {"On a laptop": 2}.get(title, 1)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.skipif(
    bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "hosts can be made"
)
@pytest.mark.parametrize("title", ON_HOSTS)
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_several_hosts(python: str, title: str, tmp_path: Path) -> None:
    with two_hosts(python, tmp_path, title) as run:
        if "tarantella checkpoint show run" in COMMANDS[title]:
            mpi_run(1, write_checkpoint, str(tmp_path / "shared" / "run")).check()
        results = check(title, run)
    told = "".join(result.stdout for result in results.values())
    if title == "On several hosts":
        tables = results["tarantella doctor --hostfile hosts"].stdout
        assert words(tables).replace("Open MPI v#", "MPICH #") == words(SHOWN)
        assert "# host node-1: ranks 0 to 1\n# host node-2: ranks 2 to 3\n" in told
        assert len(re.findall("^loss: ", told, re.MULTILINE)) == 4
    elif title == "When a host dies":
        died, _, shown = results.values()
        assert "tarantella: rank 1 of 2 on host node-2 failed first: killed by" in died.stderr
        assert re.search(r"\b16\b", shown.stdout)
    else:
        assert (tmp_path / "shared" / "trace.json").stat().st_size


def words(text: str) -> str:
    """Returns a text without figures and spaces."""
    return " ".join(re.sub(r"[\d.]*\d", "#", text).split())


@pytest.mark.slow
@pytest.mark.parametrize("title", IN_SLURM)
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_slurm(python: str, title: str, tmp_path: Path) -> None:
    """Its programs are acted: an allocation has two tasks on this host."""
    program(tmp_path, "tarantella", f'exec {python} -m tarantella_pp --mpi=slurm "$@"')
    program(tmp_path, "sbatch", 'exec bash "$@"')
    program(tmp_path, "salloc", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"')
    calls = tmp_path / "calls"
    given = {
        "PATH": os.pathsep.join([str(ROOT / "tests/launch/slurm_bin"), os.environ["PATH"]]),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SRUN_CALLS": str(calls),
        "SRUN_MPIEXEC": " ".join(find_mpiexec(python) or ()),
    }
    check(title, runs(python, tmp_path, title=title, **given))
    assert calls.read_text().count(" --ntasks=2 ") == len(COMMANDS[title])
