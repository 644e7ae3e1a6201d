"""The commands of "From a laptop to a cluster" are run: here, on two hosts, under Slurm."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, ROOT, Job, Result, executable, slurm_allocation

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
LIMIT_SECONDS = 200.0
ALONE = ("On a laptop", "On one node")
ON_HOSTS = ("On several hosts", "When it is slow", "When a host dies")
IN_SLURM = ("With Slurm",)
pytestmark = pytest.mark.mpi


def blocks(language: str) -> dict[str, list[str]]:
    sections = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)
    found = {
        title: re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {title: texts for title, texts in found.items() if texts}


COMMANDS = {title: "".join(texts).splitlines() for title, texts in blocks("bash").items()}
HOSTFILE, SHOWN = blocks("text")["On several hosts"]
# In place of the example. It trains for its trace, and leaves a checkpoint; else it is the
# launcher that matters.
STUB = """
import os, sys
from pathlib import Path

def build_model():
    import keras
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])

def train():
    import numpy as np, tarantella_pp as tnt
    model = tnt.PipelineModel(build_model(), num_stages=2, num_micro_batches=1)
    model.compile("sgd", "mse")
    own = tnt.callbacks.Checkpoint(Path(__file__).parents[1] / "run")
    model.fit(np.ones((16, 2)), np.ones((16, 1)), batch_size=1, verbose=0, callbacks=[own])

if __name__ == "__main__":
    from mpi4py.MPI import COMM_WORLD as world
    last = world.rank == world.size - 1
    if "--kill-at" in sys.argv and last:
        os.kill(os.getpid(), 9)
    world.barrier()
    for epoch in range(4 * last):
        print("loss:", epoch)
    if "TNT_TRACE" in os.environ:
        train()
"""


def run(
    titles: Sequence[str],
    python: str,
    folder: Path,
    *inside: str,
    programs: dict[str, str] | None = None,
    **environment: str,
) -> dict[str, Result]:
    """Runs the commands of sections, as a user would; returns how each has ended."""
    for name in ("examples", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "examples" / "resume.py").write_text(STUB)
    shutil.copy(ROOT / "examples" / "slurm.sbatch", folder / "examples")
    (folder / "hosts").write_text(HOSTFILE)
    mine = {"python": f'{python} "$@"', "tarantella": f'{python} -m tarantella_pp "$@"'}
    for name, text in {**mine, **(programs or {})}.items():
        executable(folder / "bin" / name, f"#!/bin/sh\nexec {text}\n")
    path = os.pathsep.join([str(folder / "bin"), environment.pop("PATH", os.environ["PATH"])])
    results = {}
    for command in (command for title in titles for command in COMMANDS[title]):
        there = f"cd {shlex.quote(str(folder))} && {command}"
        with Job(*inside, "sh", "-c", there, **environment, PATH=path) as job:
            result = results[command] = job.result(LIMIT_SECONDS)
        expected = re.search(r"# ends with (\d+)$", command)
        assert result.code == (int(expected[1]) if expected else 0), (command, result)
    return results


def test_every_section_with_commands_is_run() -> None:
    assert set(COMMANDS) == {*ALONE, *ON_HOSTS, *IN_SLURM}
    assert sum(map(len, COMMANDS.values())) > 10
    lines = [line for commands in COMMANDS.values() for line in commands]
    programs = {re.sub(r"^[A-Z_]+=\S+ ", "", line).split()[0] for line in lines}
    assert programs == {"python", "tarantella", "sbatch", "salloc"}


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_one_host(python: str, tmp_path: Path) -> None:
    results = run(ALONE, python, tmp_path)
    assert sum(result.stdout.count("loss: 3") for result in results.values()) == 3


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.skipif(
    bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "hosts can be made"
)
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_several_hosts(python: str, tmp_path: Path) -> None:
    """On the first of two, which reaches the other with `ssh`."""
    with network_hosts.network(2, tmp_path, ("node-1", "node-2")) as made:
        first, shared = made.hosts[0], tmp_path / "shared"
        given = {"UCX_TLS": "tcp,self", "TMPDIR": str(first.tmp)}
        ssh = {"ssh": f'{made.remote_shell} "$@"'}
        results = run(ON_HOSTS, python, shared, *first.inside(), programs=ssh, **given)
        assert [host.leftovers() for host in made.hosts] == [[], []]
    tables = results["tarantella doctor --hostfile hosts"].stdout
    assert words(tables).replace("Open MPI v#", "MPICH #") == words(SHOWN)
    placed = results["tarantella --hostfile hosts --dry-run -- examples/resume.py --directory run"]
    assert "# host node-1: ranks 0 to 1\n# host node-2: ranks 2 to 3\n" in placed.stdout
    trained = results["tarantella --hostfile hosts -- examples/resume.py --directory run"]
    assert trained.stdout.count("loss: ") == 4
    assert (shared / "trace.json").stat().st_size
    *_, died, _, shown = results.values()
    assert "tarantella: rank 3 of 4 on host node-2 failed first: killed by" in died.stderr
    assert re.search(r"\b16\b", shown.stdout)


def words(text: str) -> str:
    return " ".join(re.sub(r"[\d.]*\d", "#", text).split())


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_for_slurm(python: str, tmp_path: Path) -> None:
    """Its programs are acted: an allocation has two tasks on this host."""
    given = slurm_allocation(python, tmp_path / "calls")
    programs = {
        "tarantella": f'{python} -m tarantella_pp --mpi=slurm "$@"',
        "sbatch": 'bash "$@"',
        "salloc": 'sh -c \'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\' - "$@"',
    }
    results = run(IN_SLURM, python, tmp_path, programs=programs, **given)
    assert (tmp_path / "calls").read_text().count(" --ntasks=2 ") == len(results)
