"""Jobs on several hosts: which ranks run where, and what they find there."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import PYTHONS
from tests.helpers.network_hosts import Network

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.parametrize("python", PYTHONS),
    pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle()),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts."""
    with network_hosts.network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_fill_hosts_and_get_the_environment_and_threads_of_theirs(
    python: str, hosts: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Beta has one core."""
    shell = pathlib.Path(hosts.remote_shell)
    text = shell.read_text().replace("exec nsenter", "exec taskset -c 0 nsenter")
    narrow = tmp_path / "narrow-shell"
    narrow.write_text(text)
    narrow.chmod(0o700)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_OF_MINE", "a b")
    hostfile = hosts.hostfile("alpha slots=2  # here", "", "beta:1")
    options = ["--hostfile", hostfile, "--remote-shell", str(narrow), "-x", "SEED=7", "WORD=x=y"]
    script = ["--", "hosts.py", "TF_OF_MINE", "SEED", "WORD"]
    with hosts.tarantella(python, *options, *script) as job:
        result = job.result()
    assert result.code == 0, result.stderr
    alpha = f"alpha {len(os.sched_getaffinity(0)) // 2} a b 7 x=y"
    assert result.stdout.splitlines() == [alpha, alpha, "beta 1 a b 7 x=y"]


def test_hosts_that_cannot_be_reached_or_are_one_are_named(python: str, hosts: Network) -> None:
    missing = hosts.hostfile("alpha", "delta", "beta")
    with hosts.tarantella(python, "--hostfile", missing, "hosts.py") as job:
        result = job.result()
    assert result.code == 1
    assert "tarantella: Host delta of --hostfile cannot be reached: no route to delta" in (
        result.stderr
    )
    twice = hosts.hostfile("alpha", "localhost")
    with hosts.tarantella(python, "--hostfile", twice, "hosts.py") as job:
        result = job.result()
    assert result.code == 2
    assert "alpha and localhost, which both say that their name is alpha" in result.stderr
