"""Ranks on sockets of their own."""

from __future__ import annotations

import os

import pytest

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import resources


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two sockets of four cores, a node without cores, and one whose cores others have."""
    for node, cores in {0: "0-3\n", 1: "4,6-8\n", 2: "\n", 3: "20-23\n"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    bound: list[object] = []
    monkeypatch.setattr(resources, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    return bound


def test_each_rank_gets_a_socket_and_as_many_threads(machine):
    for rank in (0, 1):
        environ = {"TNT_BIND": "socket", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
        resources.take_share(environ, set(range(8)))
        assert environ["OMP_NUM_THREADS"] == str(len(machine[rank]))
    assert machine == [{0, 1, 2, 3}, {4, 6, 7}]


def test_more_ranks_than_sockets_are_refused(machine):
    with pytest.raises(LaunchError, match=r"This host has 2 \(NUMA nodes .*\), and 3 ranks"):
        resources.pin_to_socket(0, 3, memory=False)
    assert not machine


def test_memory_is_bound_where_that_is_possible(machine, monkeypatch):
    asked: list[tuple[object, ...]] = []
    answers = iter([0, -1])

    class Library:
        def syscall(self, number: int, policy: int, mask: list[int], bits: object) -> int:
            asked.append((number, policy, list(mask)))
            return next(answers)

    monkeypatch.setattr(resources.ctypes, "CDLL", lambda *_, **__: Library())
    monkeypatch.setattr(resources.platform, "machine", lambda: "x86_64")
    resources.pin_to_socket(1, 2, memory=True)
    assert asked == [(238, 2, [2])]
    with pytest.raises(LaunchError, match="is not allowed on this host"):
        resources.pin_to_socket(0, 2, memory=True)
    monkeypatch.setattr(resources.platform, "machine", lambda: "riscv64")
    with pytest.raises(LaunchError, match="Received: a host with riscv64"):
        resources.pin_to_socket(0, 2, memory=True)
