"""`tarantella doctor`, on this host and on several."""

import os
import re
import sys

import pytest
from msgspec.structs import replace

from tarantella_pp.cli.doctor_command import HostFacts, host_findings
from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, executable, tarantella

CORES = len(os.sched_getaffinity(0))
IMPATIENT = """#!/bin/sh
exec {} -c "import sys; from tarantella_pp.cli import doctor_command, main
doctor_command.WAIT_SECONDS = 4; sys.exit(main.main(sys.argv[3:]))" "$@"
"""
"""A Python for which the command waits for 4 seconds instead of 20."""
LINK = r"Messages: \S+ GB/s after \S+ us\."


def examined(job):
    """Returns the exit code of the command, the rows of its table, and what else it says."""
    with job:
        result = job.result(limit=100)
        assert not job.processes()
    assert "Traceback" not in result.stderr
    table, _, rest = result.stdout.partition("\n\n")
    return result.code, table.splitlines()[1:], rest.splitlines()


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_two_ranks_reach_each_other(python):
    code, [*table], [link, verdict] = examined(tarantella(python, "doctor", COLUMNS="200"))
    assert (code, verdict) == (0, "- Nothing is wrong.")
    assert re.search(rf" 3\.\d+\.\d+ +(MPICH|Open MPI) .* {CORES} +\d+$", table[0])
    assert re.fullmatch(LINK, link)


@pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle())
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_hosts_are_examined_and_named_where_they_are_not_reached(python, tmp_path):
    with network_hosts.network(2, tmp_path) as hosts:
        code, [alpha, beta], [link, verdict] = examined(hosts.tarantella(python, "doctor"))
        assert (code, verdict) == (0, "- Nothing is wrong.")
        assert alpha.split()[1:] == beta.split()[1:]
        assert re.fullmatch(LINK, link)

        missing = hosts.hostfile("alpha", "delta")
        code, _, told = examined(hosts.tarantella(python, "doctor", "--hostfile", missing))
        problem = " ".join(told)
        assert problem.startswith("- Ranks on alpha, delta do not all reach each other (no rank")
        assert "delta" in problem.partition(": ")[2]
        assert [host.leftovers() for host in hosts.hosts] == [[], []]
        # What beta sends to alpha by itself is lost, without a word.
        lost = "ip neighbour replace 10.97.0.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
        hosts.hosts[1].run(*lost.split())
        impatient = executable(tmp_path / "impatient", IMPATIENT.format(python))
        code, _, told = examined(hosts.tarantella(str(impatient), "doctor"))
        assert code == 1
        assert told[0].startswith("- Ranks on alpha, beta do not all reach each other")


@pytest.mark.parametrize(
    ("script", "links", "told"),
    [
        (
            """echo noise; echo '[1] {"bandwidth": 2e9, "latency": 2e-6}'
            echo tarantella: out of memory. >&2; exit 1""",
            1,
            "out of memory",
        ),
        (
            """exec >&2; echo '[mpiexec@alpha] Launch proxy failed.'; echo no route
            echo 'tarantella run: Found no MPI'; exit 1""",
            0,
            "no route Found no MPI",
        ),
        ("exit 3", 0, "exit code 3"),
    ],
)
def test_what_the_launcher_says_is_the_reason(command, monkeypatch, tmp_path, script, links, told):
    text = f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n{script}\n'
    shell = executable(tmp_path / "launcher", text)
    monkeypatch.setattr(sys, "executable", str(shell))
    assert command("doctor") == 1
    assert command.stdout.endswith(f"- Two ranks on this host do not run: {told}.\n")
    assert command.stdout.count("Messages: 2.00 GB/s after 2.0 us.") == links


VERSIONS: dict[str, str | None] = {
    "python": "3.11.7", "tarantella_pp": "0.2.0", "tensorflow": "2.21.0", "keras": "3.15.1",
    "MPI": "MPICH 5.0.2",
}  # fmt: skip
ALPHA = HostFacts("a", versions=VERSIONS, cores=4)
BETA = replace(ALPHA, host="b")


def without(**versions):
    return replace(BETA, versions={**VERSIONS, **versions})


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (replace(without(python="3.11.9"), slots=4), None),
        (HostFacts("b"), None),  # what the launcher says of it
        (without(tarantella_pp="0.1.0"), "Host b has tarantella_pp 0.1.0, host a 0.2.0: install"),
        (without(python="3.12.1"), "Host b has python 3.12.1, host a 3.11.7: install"),
        (without(MPI="Open MPI v5"), "Host b has Open MPI v5, host a MPICH 5.0.2: install"),
        (without(MPI=None), "Host b has no MPI: install it there: mpi4py and an MPI"),
        (without(keras=None), "Host b has no keras: install it there: `pip install"),
        (replace(BETA, slots=8), "Host b has 4 cores for 8 ranks: give its line fewer"),
        (replace(BETA, gpus=1), "No GPU on a, but on other hosts"),
    ],
)
def test_one_thing_that_is_wrong_is_told(host, told):
    findings = host_findings([ALPHA, host])
    assert len(findings) == (told is not None)
    assert all(finding.startswith(told) and finding.endswith(".") for finding in findings)
