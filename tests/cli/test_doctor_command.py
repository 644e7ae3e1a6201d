"""`tarantella doctor`, on this host and on several."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tarantella_pp.cli import doctor_command
from tarantella_pp.cli.doctor_command import HostFacts, host_findings
from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import mpi_launchers
from tarantella_pp.launch.hosts import Host
from tests.helpers import network_hosts
from tests.helpers.commands import Command
from tests.helpers.jobs import PYTHONS, Job, tarantella
from tests.helpers.network_hosts import Network

needs_hosts = pytest.mark.skipif(
    bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "hosts can be made"
)


def examined(job: Job) -> tuple[int, dict[str, Any]]:
    """Returns the exit code of the command, and what it says as JSON."""
    with job:
        result = job.result()
        assert not job.processes()
    assert "Traceback" not in result.stderr
    return result.code, json.loads(result.stdout)


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_two_ranks_reach_each_other(python: str) -> None:
    code, found = examined(tarantella(python, "doctor", "--json"))
    assert (code, found["problems"]) == (0, [])
    [host], [link] = found["hosts"], found["links"]
    assert host["versions"]["keras"].startswith("3.")
    assert host["versions"]["MPI"].startswith(("MPICH ", "Open MPI "))
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert min(link["latency_us"], link["bandwidth_gb_per_s"]) > 0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts."""
    with network_hosts.network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_hosts_that_are_alike_are_right(python: str, hosts: Network) -> None:
    code, found = examined(hosts.tarantella(python, "doctor", "--json"))
    assert (code, found["problems"]) == (0, [])
    alpha, beta = found["hosts"]
    assert alpha["versions"] == beta["versions"]
    [link] = found["links"]
    assert link["hosts"] == ["alpha", "beta"]
    assert min(link["latency_us"], link["bandwidth_gb_per_s"]) > 0


SOONER = """
import sys
from tarantella_pp.cli import doctor_command, main
doctor_command.START_SECONDS, doctor_command.PAIR_SECONDS = 4.0, 1.0
sys.exit(main.main(sys.argv[1:]))
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
def test_hosts_that_do_not_reach_each_other_are_told(tmp_path: pathlib.Path) -> None:
    """What beta sends to alpha by itself is lost, without a word."""
    with network_hosts.network(2, tmp_path) as made:
        alpha, beta = made.hosts
        lost = "ip neighbour replace 10.97.0.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
        beta.run(*lost.split())
        options = ["--hostfile", made.hostfile(), "--remote-shell", made.remote_shell]
        command = [PYTHONS[0], "-c", SOONER, "doctor", "--json", *options]
        environment = {"UCX_TLS": "tcp,self", "TMPDIR": str(alpha.tmp)}
        code, found = examined(Job(*alpha.inside(*command), **environment))
        assert [host.leftovers() for host in made.hosts] == [[], []]
    assert (code, found["links"]) == (1, [])
    [problem] = found["problems"]
    assert problem.startswith("Ranks on alpha, beta do not all reach each other: ")


@needs_hosts
@pytest.mark.slow
def test_hosts_that_do_not_answer_are_named_and_the_others_examined(hosts: Network) -> None:
    hostfile = hosts.hostfile("alpha", "delta", "beta")
    options = ["--json", "--hostfile", hostfile]
    code, found = examined(hosts.tarantella(PYTHONS[0], "doctor", *options))
    assert code == 1
    [problem] = found["problems"]
    assert problem.startswith("Host delta does not answer: no route to delta.")
    assert [link["hosts"] for link in found["links"]] == [["alpha", "beta"]]
    options += ["--python-interpreter", "/no/python"]
    code, found = examined(hosts.tarantella(PYTHONS[0], "doctor", *options))
    assert code == 1
    alpha, _, beta = found["problems"]
    assert alpha.startswith("Host alpha does not answer: env: ")
    assert alpha.endswith("Name a Python that finds this package with --python-interpreter.")
    assert beta.startswith("Host beta does not answer: env: ")


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
    assert "Host quiet does not answer: no answer within 2 s." in quiet.silence
    assert "Host fails does not answer: Refused. `" in fails.silence


def test_hosts_that_slurm_chooses_are_refused(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: pathlib.Path
) -> None:
    srun = mpi_launchers.Slurm("/usr/bin/srun")
    monkeypatch.setattr(mpi_launchers, "find_launcher", lambda name: srun)
    (tmp_path / "hosts").write_text("node-1\nnode-2\n")
    assert command("doctor", "--hostfile", tmp_path / "hosts") == 2
    assert "this MPI starts its ranks without one" in command.stderr
    assert "/usr/bin/srun" in command.stderr


def test_a_machine_without_mpi_is_reported(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI.")

    monkeypatch.setattr(mpi_launchers, "find_launcher", find_launcher)
    assert command("doctor", "--json") == 1
    found = json.loads(command.stdout)
    assert found["problems"] == ["Found no MPI."]
    assert found["hosts"][0]["versions"]["keras"].startswith("3.")


LINE = '{"pair": [0, 1], "latency_us": 2.0, "bandwidth_gb_per_s": 3.0}'


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[str], None]:
    """Has a shell script stand for the launcher of ranks."""

    def stand_in(script: str) -> None:
        path = tmp_path / "launcher"
        probe = f'[ "$2" = tarantella_pp.cli.doctor_probe ] && exec {sys.executable} "$@"'
        path.write_text(f"#!/bin/sh\n{probe}\n{script}\n")
        path.chmod(0o700)
        mpich = mpi_launchers.Mpich("mpiexec")
        monkeypatch.setattr(mpi_launchers, "find_launcher", lambda name: mpich)
        monkeypatch.setattr(sys, "executable", str(path))

    return stand_in


@pytest.mark.parametrize(
    ("script", "links", "told"),
    [
        (f"echo noise; echo '{LINE}'; echo tarantella: out of memory. >&2; exit 1", 1,
         "out of memory"),
        ("echo 'some noise' >&2; echo 'tarantella: no way' >&2; exit 3", 0, "no way"),
        ("exit 3", 0, "exit code 3"),
    ],
)  # fmt: skip
def test_what_the_launcher_says_is_the_reason(
    launcher: Callable[[str], None], command: Command, script: str, links: int, told: str
) -> None:
    launcher(script)
    assert command("doctor", "--json") == 1
    found = json.loads(command.stdout)
    assert found["problems"] == [f"Two ranks on this host do not run: {told}."]
    assert len(found["links"]) == links


def test_a_launcher_that_does_not_end_is_killed_and_what_it_said_kept(
    launcher: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    launcher(f"trap '' TERM; echo '{LINE}'; while :; do sleep 0.1; done")
    for limit in ("START_SECONDS", "PAIR_SECONDS", "MORE_SECONDS"):
        monkeypatch.setattr(doctor_command, limit, 0.3)
    assert command("doctor", "--json") == 1
    found = json.loads(command.stdout)
    assert found["problems"] == ["Two ranks on this host do not run: exit code -9."]
    assert [link["latency_us"] for link in found["links"]] == [2.0]


VERSIONS: dict[str, str | None] = {
    "python": "3.11.7",
    "tarantella_pp": "0.2.0",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "MPI": "MPICH 5.0.2",
}
ALPHA = HostFacts("a", versions=VERSIONS, cores=4)
BETA = replace(ALPHA, host="b")


def without(**versions: str | None) -> HostFacts:
    return replace(BETA, versions={**VERSIONS, **versions})


def test_nothing_is_wrong_with_hosts_that_agree() -> None:
    assert host_findings([ALPHA, replace(without(python="3.11.9"), slots=4)]) == []


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (without(tarantella_pp="0.1.0"), "Host b has tarantella_pp 0.1.0, host a 0.2.0: install"),
        (without(python="3.12.1"), "Host b has python 3.12.1, host a 3.11.7: install"),
        (without(MPI="Open MPI v5"), "Host b has Open MPI v5, host a MPICH 5.0.2: install"),
        (without(MPI=None), "Host b has no MPI: install it there: mpi4py and an MPI"),
        (without(keras=None), "Host b has no keras: install it there: `pip install"),
        (HostFacts("b", silence="Host b does not answer: why."), "Host b does not answer"),
        (replace(BETA, slots=8), "Host b has 4 cores for 8 ranks: give its line fewer"),
    ],
)
def test_one_thing_that_is_wrong_is_told(host: HostFacts, told: str) -> None:
    [finding] = host_findings([ALPHA, host])
    assert finding.startswith(told)
    assert finding.endswith(".")


def test_hosts_without_a_gpu_among_others_are_told() -> None:
    [finding] = host_findings([ALPHA, replace(BETA, gpus=1)])
    assert finding.startswith("No GPU on a, but on other hosts")


ANSWER = {"versions": {"python": "3.11.7"}, "cores": 2, "gpus": 0}


def heard(said: str) -> HostFacts:
    """What is known of a host that prints this, whatever it is asked."""
    shell = [sys.executable, "-c", f"print({said!r})"]
    return doctor_command.survey([Host("alpha.invalid", 2)], shell, [sys.executable])[0]


@pytest.mark.parametrize("more", ["", "\n3", "\nConnection closed."])
def test_an_answer_is_found_among_other_lines(more: str) -> None:
    found = heard(f"Welcome!\n{json.dumps(ANSWER)}{more}")
    assert found == HostFacts("alpha.invalid", 2, "", {"python": "3.11.7"}, 2, 0)


@pytest.mark.parametrize("said", ["[1]", json.dumps({**ANSWER, "versions": {"python": 3}})])
def test_what_is_no_answer_is_told_of_its_host(said: str) -> None:
    assert heard(said).silence.startswith(
        "Host alpha.invalid does not answer: no answer that this version understands."
    )
