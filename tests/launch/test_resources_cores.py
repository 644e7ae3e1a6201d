"""Which cores ranks run on."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from tarantella_pp.launch import resources
from tests.helpers.jobs import PYTHONS, tarantella

CORES = len(os.sched_getaffinity(0))


def test_shares_are_neighbours_and_disjoint(monkeypatch, tmp_path):
    """Two sockets of two cores with two hardware threads each, numbered as Linux does."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 2 % 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    monkeypatch.setattr(resources, "_TOPOLOGY", tmp_path)
    assert [resources.share(range(8), rank, 2) for rank in (0, 1)] == [
        {0, 4, 1, 5},
        {2, 6, 3, 7},
    ]
    shares = [resources.share(range(8), rank, 3) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 3, 3]
    assert set.union(*shares) == set(range(8))
    monkeypatch.setattr(resources, "_TOPOLOGY", tmp_path / "missing")
    assert resources.share([9, 3, 5, 7], 1, 2) == {7, 9}


MPICH = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
BIND = {"TNT_BIND": "cores"}


@pytest.mark.parametrize(
    ("cores", "given", "share", "threads"),
    [
        (4, {**BIND, **MPICH}, {2, 3}, "2"),
        (4, {**BIND, **OPEN_MPI}, {0, 1}, "2"),
        (6, {**BIND, **MPICH}, {3, 4, 5}, "3"),  # this host has more cores
        (4, MPICH, None, "2"),
        (4, {**BIND, **MPICH, "TNT_THREADS": "1"}, None, "1"),  # cores are left free
        (4, {**BIND, **MPICH, "TNT_THREADS": "2", "OMP_NUM_THREADS": "9"}, {2, 3}, "2"),
        (4, {**BIND, **MPICH, "OMP_NUM_THREADS": "2"}, None, "2"),
        (4, {**BIND, **MPICH, "SLURM_CPUS_PER_TASK": "3"}, None, "3"),
        (4, {**BIND, **MPICH, "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "4"}, {2, 3}, "2"),
        (4, {**BIND, **MPICH, "SLURM_CPUS_ON_NODE": "2"}, None, "1"),
        (4, {**BIND, "TNT_RANKS_PER_NODE": "2", "SLURM_LOCALID": "1"}, {2, 3}, "2"),
        (4, BIND, None, "4"),
        (1, {**BIND, **MPICH}, None, "1"),
    ],
)
def test_a_rank_takes_its_share_of_the_host_it_is_on(
    cores, given, share, threads, monkeypatch, tmp_path
):
    chosen: list[object] = []
    monkeypatch.setattr(resources, "_TOPOLOGY", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, share: chosen.append(share))
    environ = dict(given)
    resources.take_share(environ, set(range(cores)))
    assert chosen == ([] if share is None else [share])
    assert environ["TF_NUM_INTRAOP_THREADS"] == threads
    assert environ["OMP_NUM_THREADS"] == threads


def test_a_rank_that_is_bound_already_stays_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound again"))
    environ = {**BIND, **MPICH}
    resources.take_share(environ, set(range(8)))
    assert environ["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("seen", "cores"),
    [
        ([{0}, {1}, {2}, {0, 1, 2, 3}], {0, 1, 2, 3}),  # a look at each core of the host
        ([{0, 1, 2, 3, 4, 5, 6, 7}], {0, 1, 2, 3, 4, 5, 6, 7}),
        ([{4, 5}], {4, 5}),
        ([{5}] * 400, {5}),  # it has one of its own: that of the daemons of this host
    ],
)
def test_what_has_started_a_rank_may_visit_other_cores(seen, cores, monkeypatch):
    """MPICH's proxy does so when the first rank calls MPI_Init: another one may be that late."""
    moments, own, clock = iter(seen), {0, 1, 2, 3}, itertools.count()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: next(moments) if pid else own)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 99)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert resources.cores_of_starter(7) == cores


def test_cores_that_slurm_has_given_to_others_do_not_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert resources.cores_of_node({}) == 64
    assert resources.cores_of_node({"SLURM_CPUS_ON_NODE": "4"}) == 4


@pytest.mark.mpi
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("option", "own"), [("auto", True), ("none", False)])
def test_ranks_of_a_job_run_on_cores_of_their_own(python, option, own, monkeypatch):
    if option == "none":
        monkeypatch.setenv(resources.BIND_VARIABLE, "cores")  # of a job around this one
    options = ["-n", "2", "--threads", str(CORES // 2), "--bind", option]
    with tarantella(python, *options, "cores.py") as job:
        result = job.result()
    assert result.code == 0, result.stderr
    ranks = [set(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(ranks) == 2
    assert ranks[0].isdisjoint(ranks[1]) == own
    assert len(ranks[0] | ranks[1]) == CORES
