"""`tarantella doctor`, on this host and on several."""

from __future__ import annotations

import json
import os
import sys

import pytest
from msgspec.structs import replace

from tarantella_pp.cli.doctor_command import HostFacts, host_findings
from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, tarantella

needs_hosts = pytest.mark.skipif(
    bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "hosts can be made"
)


def examined(job):
    """Returns the exit code of the command, and what it says as JSON."""
    with job:
        result = job.result(limit=100)
        assert not job.processes()
    assert "Traceback" not in result.stderr
    return result.code, json.loads(result.stdout)


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_two_ranks_reach_each_other(python):
    code, found = examined(tarantella(python, "doctor", "--json"))
    assert (code, found["problems"]) == (0, [])
    [host], [link] = found["hosts"], found["links"]
    assert host["versions"]["keras"].startswith("3.")
    assert host["versions"]["MPI"].startswith(("MPICH ", "Open MPI "))
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert min(link["latency_us"], link["bandwidth_gb_per_s"]) > 0


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_hosts_are_examined_and_named_where_they_are_not_reached(python, tmp_path):
    with network_hosts.network(2, tmp_path) as hosts:
        code, found = examined(hosts.tarantella(python, "doctor", "--json"))
        assert (code, found["problems"]) == (0, [])
        alpha, beta = found["hosts"]
        assert alpha["versions"] == beta["versions"]
        [link] = found["links"]
        assert link["hosts"] == ["alpha", "beta"]
        assert min(link["latency_us"], link["bandwidth_gb_per_s"]) > 0

        missing = hosts.hostfile("alpha", "delta")
        code, found = examined(hosts.tarantella(python, "doctor", "--json", "--hostfile", missing))
        [problem] = found["problems"]
        assert problem.startswith("Ranks on alpha, delta do not all reach each other (no rank")
        assert "delta" in problem.partition(": ")[2]
        assert [host.leftovers() for host in hosts.hosts] == [[], []]
        # What beta sends to alpha by itself is lost, without a word.
        lost = "ip neighbour replace 10.97.0.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
        hosts.hosts[1].run(*lost.split())
        code, found = examined(hosts.tarantella(python, "doctor", "--json"))
        assert (code, found["links"]) == (1, [])
        [problem] = found["problems"]
        assert problem.startswith("Ranks on alpha, beta do not all reach each other")


@pytest.mark.parametrize(
    ("script", "links", "told"),
    [
        (
            """echo noise; echo '[1] {"pair": [0, 1], "latency_us": 2.0}'
            echo tarantella: out of memory. >&2; exit 1""",
            1,
            "out of memory",
        ),
        (
            "echo no route >&2; echo 'tarantella run: Found no MPI' >&2; exit 1",
            0,
            "no route Found no MPI",
        ),
        ("exit 3", 0, "exit code 3"),
    ],
)
def test_what_the_launcher_says_is_the_reason(command, monkeypatch, tmp_path, script, links, told):
    shell = tmp_path / "launcher"
    shell.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n{script}\n')
    shell.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(shell))
    assert command("doctor", "--json") == 1
    found = json.loads(command.stdout)
    assert found["problems"] == [f"Two ranks on this host do not run: {told}."]
    assert len(found["links"]) == links
    assert found["hosts"][0]["versions"]["keras"].startswith("3.")


VERSIONS: dict[str, str | None] = {
    "python": "3.11.7",
    "tarantella_pp": "0.2.0",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "MPI": "MPICH 5.0.2",
}
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
