"""Jobs on two hosts: which ranks run where, what they find there, and how they end."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import sys
import time

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS, ROOT, SCRIPTS
from tests.helpers.mpi import mpi_run
from tests.helpers.network_hosts import Network

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.parametrize("python", PYTHONS),
    pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle()),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts."""
    with network_hosts.network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_fill_hosts_and_get_the_environment_and_threads_of_theirs(
    python, hosts, monkeypatch, tmp_path
):
    """Beta has one core."""
    shell = pathlib.Path(hosts.remote_shell)
    text = shell.read_text().replace("exec nsenter", "exec taskset -c 0 nsenter")
    narrow = tmp_path / "narrow-shell"
    narrow.write_text(text)
    narrow.chmod(0o700)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_OF_MINE", "a b")
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    hostfile = hosts.hostfile("alpha slots=2  # here", "", "beta:1")
    options = ["--hostfile", hostfile, "--remote-shell", str(narrow), "-x", "SEED=7", "WORD=x=y"]
    script = ["--", "hosts.py", "TF_OF_MINE", "LD_PRELOAD", "SEED", "WORD"]
    with hosts.tarantella(python, *options, *script) as job:
        result = job.result()
    assert result.code == 0, result.stderr
    alpha = f"alpha {len(os.sched_getaffinity(0)) // 2} a b libm.so.6 7 x=y"
    assert result.stdout.splitlines() == [alpha, alpha, "beta 1 a b libm.so.6 7 x=y"]


def test_hosts_that_cannot_be_reached_end_the_job(python, hosts):
    missing = hosts.hostfile("alpha", "delta", "beta")
    with hosts.tarantella(python, "--hostfile", missing, "hosts.py") as job:
        result = job.result(LONG_SECONDS)
    assert result.code != 0
    assert "`tarantella doctor --hostfile` asks their hosts why" in result.stderr
    check_clean(hosts)


LONG_SECONDS = 80.0
"""What a job may take whose ranks do not start: they have a minute."""
SKEWED = """
import socket, time
if socket.gethostname() == "beta":
    real, ahead = time.time, {seconds}
    time.time = lambda: real() + ahead
    time.time_ns = lambda: int(1e9 * time.time())
"""


@pytest.fixture
def clocks(tmp_path):
    """What sets the clock of beta wrong, by a minute and a half."""
    (tmp_path / "sitecustomize.py").write_text(
        SKEWED.format(seconds=90 if os.getpid() % 2 else -90)
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.fixture
def private(hosts):
    """A folder with the scripts, of which each host has its own."""
    for host in hosts.hosts:
        for script in ("fault.py", "hello.py"):
            (host.seen(host.work) / script).write_text((SCRIPTS / script).read_text())
    return hosts.hosts[0].work


def check_clean(hosts: Network) -> None:
    """Checks that nothing is left on any host."""
    for host in hosts.hosts:
        assert host.leftovers() == [], host.name


def test_hosts_need_not_share_a_folder(python, hosts, private, clocks):
    with hosts.tarantella(python, "-n", "2", "hello.py", folder=private, **clocks) as job:
        result = job.result()
    assert result.code == 0, result.stderr
    assert result.stdout.startswith("hello 1 2\n")
    check_clean(hosts)


@pytest.mark.parametrize(
    ("fault", "folder", "per_host", "code", "cause"),
    [
        ("raise", "private", 1, 1, "ValueError: a bad apple (fault.py:39)"),
        ("exit5", "private", 2, 5, "sys.exit(5)"),
        ("sigkill", "shared", 2, 137, "killed by SIGKILL"),
        pytest.param("orphan", "shared", 1, 1, "ValueError: a bad", marks=pytest.mark.slow),
        pytest.param("_exit0", "shared", 2, 1, "exit code 0 before", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_on_another_host_is_named(
    python, fault, folder, per_host, code, cause, hosts, private, clocks
):
    hostfile = hosts.hostfile(*(f"{host.name}:{per_host}" for host in hosts.hosts))
    script = ["-x", f"FAULT_RANK={per_host}", "--", "fault.py", fault, "recv"]
    where = private if folder == "private" else SCRIPTS
    with hosts.tarantella(python, "--hostfile", hostfile, *script, folder=where, **clocks) as job:
        job.wait_until_ready()
        result = job.result()
    (headline,) = [line for line in result.stderr.splitlines() if "failed first" in line]
    who = f"tarantella: rank {per_host} of {2 * per_host} on host beta failed first: "
    assert headline.startswith(who)
    assert cause in headline
    assert result.code == code
    assert result.stderr.count("Traceback (most recent") == ("ValueError" in cause)
    check_clean(hosts)


def test_a_script_that_is_missing_on_another_host_is_named(python, hosts, private):
    (hosts.hosts[1].seen(private) / "hello.py").unlink()
    with hosts.tarantella(python, "hello.py", folder=private) as job:
        result = job.result()
    assert result.code == 1
    assert "rank 1 of 2 on host beta failed first: FileNotFoundError" in result.stderr
    check_clean(hosts)


def test_an_interpreter_that_is_missing_on_another_host_ends_the_job(python, hosts):
    own = hosts.hosts[0].seen(hosts.hosts[0].tmp) / "python"
    own.symlink_to(python)
    interpreter = str(hosts.hosts[0].tmp / "python")
    with hosts.tarantella(python, "--python-interpreter", interpreter, "hello.py") as job:
        result = job.result(LONG_SECONDS)
    assert result.code != 0
    assert interpreter in result.stderr
    own.unlink()
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


@pytest.mark.slow
def test_an_outage_is_survived(python, hosts):
    with hosts.tarantella(python, "fault.py", "return", "work") as job:
        job.wait_until_ready()
        hosts.link(1, "down")
        time.sleep(2)
        hosts.link(1, "up")
        result = job.result()
    assert result.code == 0, result.stderr
    check_clean(hosts)


def losses_in(text: str) -> list[float]:
    """Returns the losses that the script has printed."""
    (line,) = [line for line in text.splitlines() if line.startswith("losses ")]
    return [float.fromhex(loss) for loss in line.split()[1:]]


@pytest.mark.slow
def test_losses_are_those_of_one_host(python, hosts):
    hostfile = hosts.hostfile("alpha:2", "beta:1")
    options = ["--hostfile", hostfile, "--threads", "1", "--", "losses.py"]
    with hosts.tarantella(python, *options) as job:
        result = job.result(LONG_SECONDS)
    assert result.code == 0, result.stderr
    here = mpi_run(3, SCRIPTS / "losses.py", python=sys.executable).check()
    expected = losses_in(here.stdout)
    assert expected[3] < expected[0]
    assert losses_in(result.stdout) == pytest.approx(expected, rel=1e-13, abs=0)
