"""Jobs on two hosts: which ranks run where, what they find there, and how they end."""

import os
import pathlib
import re
import shutil
import signal

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, SCRIPTS, executable
from tests.helpers.network_hosts import Network

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.parametrize("python", PYTHONS),
    pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle()),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with network_hosts.network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_fill_hosts_and_get_the_environment_and_threads_of_theirs(
    python, hosts, monkeypatch, tmp_path
):
    """Beta has one core."""
    shell = pathlib.Path(hosts.remote_shell)
    text = shell.read_text().replace("exec nsenter", "exec taskset -c 0 nsenter")
    narrow = executable(tmp_path / "narrow-shell", text)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_OF_MINE", "a b")
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    hostfile = hosts.hostfile("alpha slots=2  # here", "", "beta:1")
    options = ["--hostfile", hostfile, "--remote-shell", str(narrow)]
    options += ["-x", "SEED=7", "-x", "WORD=x=y"]
    script = ["--", "hosts.py", "TF_OF_MINE", "LD_PRELOAD", "SEED", "WORD"]
    with hosts.tarantella(python, *options, *script) as job:
        result = job.result()
    assert result.code == 0, result.stderr
    alpha = f"alpha {len(os.sched_getaffinity(0)) // 2} a b libm.so.6 7 x=y"
    assert result.stdout.splitlines() == [alpha, alpha, "beta 1 a b libm.so.6 7 x=y"]


def check_clean(hosts: Network) -> None:
    for host in hosts.hosts:
        assert host.leftovers() == [], host.name


def test_a_rank_that_fails_on_another_host_is_named(python, hosts):
    """Each host has a script of its own. `test_cluster_page.py` has a rank that is killed."""
    for host in hosts.hosts:
        shutil.copy(SCRIPTS / "fault.py", host.seen(host.work))
    own = hosts.hosts[0].work
    with hosts.tarantella(python, "--", "fault.py", "orphan", "recv", folder=own) as job:
        job.wait_until_ready()
        result = job.result()
    (headline,) = [line for line in result.stderr.splitlines() if "failed first" in line]
    who = "tarantella: rank 1 of 2 on host beta failed first: "  # Open MPI may write a zero before
    assert f"{who}ValueError: a bad apple (fault.py:34)" in headline
    assert result.code == 1
    assert result.stderr.count("Traceback (most recent") == 1
    check_clean(hosts)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.slow
def test_a_launcher_that_ends_leaves_nothing_on_other_hosts(python, number, hosts):
    with hosts.tarantella(python, "fault.py", "none", "recv") as job:
        job.wait_until_ready()
        job.send(number)
        result = job.result()
        assert hosts.hosts[1].leftovers() == []
    assert result.code == (130 if number == signal.SIGINT else -number), result.stderr
    for path in hosts.hosts[0].seen(hosts.hosts[0].tmp).iterdir():  # one that is killed leaves
        shutil.rmtree(path)
    check_clean(hosts)


def test_messages_and_sums_are_those_of_one_host(python, hosts):
    options = ["--hostfile", hosts.hostfile("alpha:2", "beta:1"), "--threads", "1"]
    with hosts.tarantella(python, *options, "--", "cases.py") as job:
        result = job.result(limit=80)
    assert result.code == 0, result.stderr
    assert result.stdout == "{}\n"


@pytest.mark.slow
def test_a_job_goes_on_with_fewer_stages_where_a_host_has_died(python, hosts, tmp_path):
    """Three ranks are two then, for which three stages are too many."""
    shell = pathlib.Path(hosts.remote_shell)
    refusal = f'[ "$1" = beta ] && [ -e {tmp_path}/5-2 ] && exit 255\ncase'
    text = shell.read_text().replace("case", refusal, 1)
    mortal = executable(tmp_path / "mortal-shell", text)
    options = ["--hostfile", hosts.hostfile("alpha:2", "beta:1"), "--remote-shell", str(mortal)]
    script = ["--", "restarted.py", str(tmp_path), "3", "5-2"]
    with hosts.tarantella(python, *options, "--restarts", "2", *script) as job:
        result = job.result(limit=300)
    assert result.code == 0, result.stderr
    assert "tarantella: restart 1 of 2: host alpha: ranks 0 to 1\n" in result.stderr
    assert "num_stages=3 and num_replicas=None do not fit the 2 ranks" in result.stderr
    assert re.fullmatch("2 ranks, [12] stages, close: True\n", result.stdout)
    check_clean(hosts)
