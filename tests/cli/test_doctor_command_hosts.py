"""`tarantella doctor --hostfile` on two hosts."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tarantella_pp.cli import doctor_command
from tarantella_pp.cli.doctor_command import HostFacts, host_findings, usable
from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import mpi_launchers
from tarantella_pp.launch.hosts import Host
from tests.helpers import network_hosts
from tests.helpers.commands import Command
from tests.helpers.jobs import PYTHONS, ROOT, Job
from tests.helpers.network_hosts import Network

needs_hosts = pytest.mark.skipif(
    bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "hosts can be made"
)
OTHERWISE = """
import socket, sys, time
if socket.gethostname() == "beta":
    {change}
"""
"""What Python does first on all hosts: something else on beta."""
AHEAD = "real = time.time; time.time = lambda: real() + 90"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts."""
    with network_hosts.network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def examined(
    hosts: Network, python: str, *arguments: str, **environment: str
) -> tuple[int, dict[str, Any]]:
    """Returns the exit code of the command, and what it says as JSON."""
    with hosts.tarantella(python, "doctor", "--json", *arguments, **environment) as job:
        result = job.result()
        assert not job.processes()
    assert "Traceback" not in result.stderr
    return result.code, json.loads(result.stdout)


def on_beta(folder: pathlib.Path, change: str) -> dict[str, str]:
    """Has Python do something on beta before all else."""
    (folder / "sitecustomize.py").write_text(OTHERWISE.format(change=change))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_hosts_that_are_alike_are_right(python: str, hosts: Network) -> None:
    code, found = examined(hosts, python)
    assert (code, found["problems"]) == (0, [])
    alpha, beta = found["hosts"]
    assert [alpha["name"], beta["name"]] == ["alpha", "beta"]
    assert alpha["versions"] == beta["versions"]
    assert alpha["versions"]["MPI"].startswith(("MPICH ", "Open MPI "))
    assert alpha["cores"] == len(os.sched_getaffinity(0))
    [link] = found["links"]
    assert link["hosts"] == ["alpha", "beta"]
    assert link["latency_us"] > 0
    assert link["bandwidth_gb_per_s"] > 0


SOONER = """
import sys
from tarantella_pp.cli import doctor_command, main
doctor_command.START_SECONDS, doctor_command.PAIR_SECONDS = 8.0, 1.0
sys.exit(main.main(sys.argv[1:]))
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
def test_a_dead_link_is_named_and_the_others_are_measured(tmp_path: pathlib.Path) -> None:
    """What beta sends to gamma is lost, without a word."""
    with network_hosts.network(3, tmp_path) as made:
        beta = made.hosts[1]
        lost = "ip neighbour replace 10.97.0.3 lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
        beta.run(*lost.split())
        options = ["--hostfile", made.hostfile(), "--remote-shell", made.remote_shell]
        command = [PYTHONS[0], "-c", SOONER, "doctor", "--json", *options]
        environment = {"UCX_TLS": "tcp,self", "TMPDIR": str(made.hosts[0].tmp)}
        with Job(*made.hosts[0].inside(*command), **environment) as job:
            result = job.result(200.0)
        left = [host.leftovers() for host in made.hosts]
    found = json.loads(result.stdout)
    assert result.code == 1
    [problem] = found["problems"]
    assert problem.startswith("No messages of MPI pass between beta and gamma: ")
    assert [link["hosts"] for link in found["links"]] == [["alpha", "beta"], ["alpha", "gamma"]]
    assert left == [[], [], []]


@needs_hosts
@pytest.mark.slow
def test_hosts_that_do_not_answer_are_named_and_the_others_examined(hosts: Network) -> None:
    hostfile = hosts.hostfile("alpha", "delta", "beta", "localhost")
    code, found = examined(hosts, PYTHONS[0], "--hostfile", hostfile)
    assert code == 1
    assert [host["name"] for host in found["hosts"]] == ["alpha", "", "beta", "alpha"]
    assert [link["hosts"] for link in found["links"]] == [["alpha", "beta"]]
    silent, twice = found["problems"][:2]
    assert silent.startswith("Host delta of --hostfile does not answer: no route to delta.")
    assert twice.startswith("Hosts alpha, localhost say that their name is alpha")


@needs_hosts
@pytest.mark.slow
def test_a_clock_that_is_wrong_is_told(hosts: Network, tmp_path: pathlib.Path) -> None:
    code, found = examined(hosts, PYTHONS[0], **on_beta(tmp_path, AHEAD))
    assert code == 1
    [problem] = found["problems"]
    assert problem.startswith("The clock of host beta is 90 s ahead of the one here")


@needs_hosts
@pytest.mark.slow
def test_a_python_that_is_missing_on_all_hosts_is_told(hosts: Network) -> None:
    code, found = examined(hosts, PYTHONS[0], "--python-interpreter", "/no/python")
    assert code == 1
    alpha, beta = found["problems"][:2]
    assert alpha.startswith("Host alpha, which is this one, does not answer: env: ")
    assert alpha.endswith("Name a Python that finds this package with --python-interpreter.")
    assert beta.startswith("Host beta of --hostfile does not answer: env: ")


def test_a_host_that_says_nothing_is_waited_for_no_longer_than_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A process that the shell has left behind holds its output open, as a shared ssh does."""
    monkeypatch.setattr(doctor_command, "ANSWER_SECONDS", 2.0)
    shell = tmp_path / "shell"
    shell.write_text(
        '#!/bin/sh\ncase "$1" in quiet) exec sleep 60;; esac\n'
        "sleep 5 &\necho Refused. >&2\nexit 3\n"
    )
    shell.chmod(0o700)
    start = time.monotonic()
    quiet, fails = doctor_command.survey(
        [Host("quiet"), Host("fails", 2)], [str(shell)], ["python"]
    )
    assert time.monotonic() - start < 30
    assert "Host quiet of --hostfile does not answer: no answer within 2 s." in quiet.silence
    assert "Host fails of --hostfile does not answer: Refused. `" in fails.silence


def test_hosts_that_slurm_chooses_are_refused(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: pathlib.Path
) -> None:
    srun = mpi_launchers.Slurm("/usr/bin/srun")
    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", lambda name: srun)
    (tmp_path / "hosts").write_text("node-1\nnode-2\n")
    assert command("doctor", "--hostfile", tmp_path / "hosts") == 2
    assert "this MPI starts its ranks without one" in command.stderr
    assert "/usr/bin/srun" in command.stderr


def test_hosts_are_examined_where_the_launcher_has_no_mpi(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: pathlib.Path
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI.")

    monkeypatch.setattr(doctor_command.mpi_launchers, "find_launcher", find_launcher)
    (tmp_path / "hosts").write_text("localhost\n")
    assert command("doctor", "--json", "--hostfile", tmp_path / "hosts") == 1
    found = json.loads(command.stdout)
    assert found["problems"][0] == "Found no MPI."
    assert found["hosts"][0]["versions"]["keras"].startswith("3.")


VERSIONS: dict[str, str | None] = {
    "python": "3.11.7",
    "tarantella_pp": "0.2.0",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "MPI": "MPICH 5.0.2",
}
HERE = HostFacts(host="a", name="a", versions=VERSIONS, cores=4, gpus=0, ahead=0.0)
RIGHT = replace(HERE, host="b", name="b")


def without(**versions: str | None) -> HostFacts:
    return replace(RIGHT, versions={**VERSIONS, **versions})


def test_nothing_is_wrong_with_hosts_that_agree() -> None:
    other = replace(without(python="3.11.9"), ahead=-0.3, slots=4)
    assert host_findings(HERE, [HERE, other]) == []
    assert [host.host for host in usable(HERE, [HERE, other])] == ["a", "b"]


@pytest.mark.parametrize(
    ("host", "told", "is_usable"),
    [
        (without(tarantella_pp="0.1.0"), "Host b has tarantella_pp 0.1.0, this one 0.2.0:", True),
        (without(python="3.12.1"), "Host b has python 3.12.1, this one 3.11.7: name one", True),
        (without(MPI="Open MPI v5"), "Host b has Open MPI v5, this one MPICH 5.0.2: ranks", False),
        (without(MPI=None), "Host b has no MPI: install it there: mpi4py and an MPI", False),
        (without(keras=None), "Host b has no keras: install it there: `pip install", True),
        (
            HostFacts(host="b", silence="Host b does not answer: why."),
            "Host b does not answer",
            False,
        ),
        (replace(RIGHT, has_folder=False), "Host b has no folder like the one", False),
        (replace(RIGHT, ahead=61.2), "The clock of host b is 61 s ahead of the one here", True),
        (replace(RIGHT, ahead=-90.0), "The clock of host b is 90 s behind the one here", True),
        (replace(RIGHT, slots=8), "Host b has 4 cores for 8 ranks: give its line fewer", True),
    ],
)
def test_one_thing_that_is_wrong_is_told(host: HostFacts, told: str, is_usable: bool) -> None:
    [finding] = host_findings(HERE, [HERE, host])
    assert finding.startswith(told)
    assert finding.endswith(".")
    assert [host.host for host in usable(HERE, [HERE, host])] == ["a", "b"][: 1 + is_usable]


def test_a_host_with_two_lines_is_used_once() -> None:
    hosts = [HERE, replace(RIGHT, name="a")]
    [finding] = host_findings(HERE, hosts)
    assert finding.startswith("Hosts a, b say that their name is a: give one host one line")
    assert usable(HERE, hosts) == [HERE]


def test_hosts_are_compared_with_each_other_where_the_launcher_has_no_tensorflow() -> None:
    here = replace(HERE, versions={**VERSIONS, "tensorflow": None})
    hosts: list[Any] = [RIGHT, replace(without(tensorflow="2.20.0"), host="c", name="c")]
    [finding] = host_findings(here, hosts)
    assert finding.startswith("Host c has tensorflow 2.20.0, host b 2.21.0: install")


def test_gpus_that_some_hosts_lack_or_have_too_few_of_are_told() -> None:
    one, none = replace(RIGHT, gpus=1, slots=2), replace(RIGHT, host="c", name="c")
    few, missing = host_findings(HERE, [one, none])
    assert few.startswith("Host b has 1 GPU for 2 ranks, which need --share-gpus")
    assert missing.startswith("No GPU on c, but on other hosts")


ANSWER = {"name": "alpha", "versions": {"python": "3.11.7"}, "cores": 2, "gpus": 0}


def heard(said: str) -> doctor_command.HostFacts:
    """What is known of a host that prints this, whatever it is asked."""
    shell = [sys.executable, "-c", f"print({said!r})"]
    return doctor_command.survey([Host("alpha.invalid", 2)], shell, [sys.executable])[0]


@pytest.mark.parametrize("more", ["", "\n3", "\nConnection closed."])
def test_an_answer_is_found_among_other_lines(more) -> None:
    found = heard(f"Welcome!\n{json.dumps(ANSWER)}{more}")
    assert (found.silence, found.name, found.cores) == ("", "alpha", 2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Welcome!", "no answer in what it has printed"),
        ("[1]", "no answer in what it has printed"),
        (json.dumps({**ANSWER, "versions": [3, 11]}), "does not understand"),
        (json.dumps({**ANSWER, "versions": {"python": 3}}), "does not understand"),
        (json.dumps({**ANSWER, "cores": "2"}), "does not understand"),
        (json.dumps({**ANSWER, "time": "noon"}), "does not understand"),
    ],
)
def test_what_is_no_answer_is_told_of_its_host(said, told) -> None:
    found = heard(said)
    assert found.silence.startswith("Host alpha.invalid of --hostfile does not answer: ")
    assert told in found.silence
