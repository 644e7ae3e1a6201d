"""Jobs on two and three hosts train to the same numbers as on one."""

from __future__ import annotations

import itertools
import shutil
import sys

import pytest

from tests.helpers import network_hosts
from tests.helpers.draws import more_asked_for
from tests.helpers.jobs import PYTHONS, SCRIPTS
from tests.helpers.mpi import mpi_run

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.parametrize("python", PYTHONS),
    pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle()),
]
TRAINING_SECONDS = 120.0
ORDINARY = [(3, "private", 1)]
"""Hosts, their folders and ranks of each that are always tried; all are on demand."""
CELLS = [*itertools.product((2, 3), ("shared", "private"), (1, 2))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Three hosts, each with a copy of the script in a folder of its own."""
    with network_hosts.network(3, tmp_path_factory.mktemp("hosts")) as made:
        for host in made.hosts:
            shutil.copy(SCRIPTS / "losses.py", host.seen(host.work))
        yield made


def losses_in(text: str) -> list[float]:
    """Returns the losses that the script has printed."""
    found = [line.split()[1:] for line in text.splitlines() if line.startswith("losses ")]
    assert len(found) == 1, text
    return [float.fromhex(loss) for loss in found[0]]


@pytest.mark.parametrize(
    ("num_hosts", "folder", "per_host"), CELLS if more_asked_for() else ORDINARY
)
def test_losses_are_those_of_one_host(python, num_hosts, folder, per_host, hosts):
    hostfile = hosts.hostfile(*(f"{host.name}:{per_host}" for host in hosts.hosts[:num_hosts]))
    where = hosts.hosts[0].work if folder == "private" else SCRIPTS
    options = ["--hostfile", hostfile, "--threads", "1", "--", "losses.py"]
    with hosts.tarantella(python, *options, folder=where) as job:
        result = job.result(TRAINING_SECONDS)
    assert result.code == 0, result.stderr
    for host in hosts.hosts:
        assert host.leftovers() == [], host.name
    here = mpi_run(num_hosts * per_host, SCRIPTS / "losses.py", python=sys.executable).check()
    expected = losses_in(here.stdout)
    assert len(expected) == 8
    assert expected[3] < expected[0]
    assert losses_in(result.stdout) == pytest.approx(expected, rel=1e-13, abs=0)
