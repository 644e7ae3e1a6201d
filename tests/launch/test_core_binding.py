"""Which cores ranks run on."""

from __future__ import annotations

import os
import pathlib

import pytest

from tarantella_pp.launch import core_binding, rank_environment
from tests.helpers.jobs import PYTHONS, tarantella

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "shared"),
    [
        (8, 2, 4, 8),
        (8, 3, 2, 8),
        (8, 8, 1, 8),
        (8, 2, 1, None),  # six cores are free, for other jobs as well
        (8, 2, 8, None),  # the user wants more threads than cores
        (8, 9, 1, None),
        (8, 1, 8, None),
    ],
)
def test_ranks_are_bound_where_their_threads_fill_the_node(
    cores: int, ranks: int, threads: int, shared: int | None
) -> None:
    assert core_binding.cores_to_share(cores, ranks, threads) == shared


def test_the_users_own_threads_leave_ranks_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_environment, "cores_of_node", lambda: 8)
    assert rank_environment.binding(4, 2, {}, False) == {core_binding.BIND_VARIABLE: "8"}
    assert (
        rank_environment.binding(4, 2, {"OMP_NUM_THREADS": "4"}, False) == rank_environment.UNBOUND
    )
    assert (
        rank_environment.binding(4, 2, {"OMP_NUM_THREADS": "4"}, True) != rank_environment.UNBOUND
    )


def test_shares_are_neighbours_and_disjoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Two sockets of two cores with two hardware threads each, numbered as Linux does."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 2 % 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    monkeypatch.setattr(core_binding, "_TOPOLOGY", tmp_path)
    assert [core_binding.share(range(8), rank, 2) for rank in (0, 1)] == [
        {0, 4, 1, 5},
        {2, 6, 3, 7},
    ]
    shares = [core_binding.share(range(8), rank, 3) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 3, 3]
    assert set.union(*shares) == set(range(8))
    monkeypatch.setattr(core_binding, "_TOPOLOGY", tmp_path / "missing")
    assert core_binding.share([9, 3, 5, 7], 1, 2) == {7, 9}


def bound(monkeypatch: pytest.MonkeyPatch, cores: int, **given: str) -> object:
    """The cores that a process with so many of them is bound to."""
    chosen: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, share: chosen.append(share))
    core_binding.bind_to_share(given)
    return chosen[0] if chosen else None


def test_a_rank_is_bound_once_and_only_by_us(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(core_binding, "_TOPOLOGY", tmp_path / "missing")
    mpich = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    open_mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert bound(monkeypatch, 4, TNT_BIND_CORES="4", **mpich) == {2, 3}
    assert bound(monkeypatch, 4, TNT_BIND_CORES="4", **open_mpi) == {0, 1}
    assert bound(monkeypatch, 2, TNT_BIND_CORES="4", **mpich) is None  # bound already
    assert bound(monkeypatch, 4, **mpich) is None
    assert bound(monkeypatch, 4, TNT_BIND_CORES="4") is None
    assert bound(monkeypatch, 1, TNT_BIND_CORES="1", **mpich) is None


@pytest.mark.mpi
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("option", "own"), [("auto", True), ("none", False)])
def test_ranks_of_a_job_run_on_cores_of_their_own(
    python: str, option: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "none":
        monkeypatch.setenv(core_binding.BIND_VARIABLE, str(CORES))  # of a job around this one
    options = ["-n", "2", "--threads", str(CORES // 2), "--bind", option]
    with tarantella(python, *options, "cores.py") as job:
        result = job.result()
    assert result.code == 0, result.stderr
    ranks = [set(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(ranks) == 2
    assert ranks[0].isdisjoint(ranks[1]) == own
    assert len(ranks[0] | ranks[1]) == CORES
