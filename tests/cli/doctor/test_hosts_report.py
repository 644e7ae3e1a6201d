"""`tarantella doctor --hostfile` on two hosts."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tarantella_pp.cli.doctor import host_survey, hosts_report
from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import mpi_launchers, remote_hosts
from tarantella_pp.launch.hosts import Host
from tarantella_pp.partition.plan.hardware_spec import machine_of
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
OLD = "sys.path.insert(0, {folder!r})"
SHORTER = """
from tarantella_pp.cli.doctor import compute_probes
compute_probes.KINDS = {"product": compute_probes.KINDS["product"]}
compute_probes.ComputeProbes.measure.__defaults__ = (0.0,)
"""
"""What Python does first so that ranks measure layers of one kind, and no longer than they must."""


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


@needs_hosts
@pytest.mark.slow
@pytest.mark.mpi
def test_the_machine_has_the_link_between_hosts(hosts: Network, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "machine.json")
    (tmp_path / "sitecustomize.py").write_text(SHORTER)
    given = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    hostfile = hosts.hostfile("alpha:1", "beta:2")
    code, found = examined(hosts, PYTHONS[0], "--hostfile", hostfile, "--save", path, **given)
    assert (code, found["problems"]) == (0, [])
    machine = machine_of(path)
    assert found["machine"] == msgspec.to_builtins(machine)
    assert machine.bandwidth == pytest.approx(1e9 * found["links"][0]["bandwidth_gb_per_s"])
    assert 1e8 < machine.flops_per_second < 1e16
    assert set(machine.layers) == {"product"}


SOONER = """
import sys
from tarantella_pp.cli import main
from tarantella_pp.cli.doctor import link_survey
link_survey.START_SECONDS, link_survey.PAIR_SECONDS = 8.0, 1.0
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
    assert problem.startswith("The clock of host beta is 90 s ahead of that of this one")


@needs_hosts
@pytest.mark.slow
def test_an_older_version_of_this_package_is_told(hosts: Network, tmp_path: pathlib.Path) -> None:
    """It knows less to say."""
    launch = tmp_path / "old" / "tarantella_pp" / "launch"
    launch.mkdir(parents=True)
    (launch.parent / "__init__.py").write_text('__version__ = "0.0.9"\n')
    (launch / "__init__.py").write_text("")
    (launch / "host_answer.py").write_text(
        'import json\nprint(json.dumps({"name": "beta", "reasons": []}))\n'
    )
    given = on_beta(tmp_path, OLD.format(folder=str(tmp_path / "old")))
    code, found = examined(hosts, PYTHONS[0], **given)
    assert code == 1
    assert found["problems"][0].startswith("Host beta has tarantella_pp 0.0.9, this one 0.")


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
    monkeypatch.setattr(remote_hosts, "LIMIT_SECONDS", 2.0)
    shell = tmp_path / "shell"
    shell.write_text(
        '#!/bin/sh\ncase "$1" in quiet) exec sleep 60;; esac\n'
        "sleep 5 &\necho Refused. >&2\nexit 3\n"
    )
    shell.chmod(0o700)
    start = time.monotonic()
    quiet, fails = host_survey.survey([Host("quiet"), Host("fails", 2)], [str(shell)], ["python"])
    assert time.monotonic() - start < 30
    assert "Host quiet of --hostfile does not answer: no answer within 2 s." in quiet.silence
    assert "Host fails of --hostfile does not answer: Refused. `" in fails.silence


def test_options_of_hosts_need_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(capsys)
    assert command("doctor", "--remote-shell", "rsh") == 2
    assert "--remote-shell is for the hosts of --hostfile, which is missing" in command.stderr


def test_hosts_are_examined_where_the_launcher_has_no_mpi(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def find_launcher(name: str) -> None:
        raise LaunchError("Found no MPI.")

    monkeypatch.setattr(hosts_report.mpi_launchers, "find_launcher", find_launcher)
    (tmp_path / "hosts").write_text("localhost\n")
    command, path = Command(capsys), str(tmp_path / "machine.json")
    code = command("doctor", "--json", "--hostfile", tmp_path / "hosts", "--save", path)
    found = json.loads(command.stdout)
    assert code == 1
    assert found["problems"][0] == "Found no MPI."
    assert found["problems"][-1].startswith(f"{path} was not written: ")
    assert found["hosts"][0]["versions"]["keras"].startswith("3.")
    assert not os.path.exists(path)


def test_hosts_that_slurm_chooses_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    srun = mpi_launchers.Slurm("/usr/bin/srun")
    monkeypatch.setattr(hosts_report.mpi_launchers, "find_launcher", lambda name: srun)
    (tmp_path / "hosts").write_text("node-1\nnode-2\n")
    command = Command(capsys)
    assert command("doctor", "--hostfile", tmp_path / "hosts") == 2
    assert "this MPI starts its ranks without one" in command.stderr
    assert "/usr/bin/srun" in command.stderr
