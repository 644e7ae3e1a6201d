"""A share of a host for each rank: cores, a socket, a GPU."""

import os
import re
import sys
from unittest import mock

import pytest

from tarantella_pp.errors import LaunchError
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
    assert [resources.share(range(8), rank, 2) for rank in (0, 1)] == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    shares = [resources.share(range(8), rank, 3) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 3, 3]
    assert set.union(*shares) == set(range(8))
    monkeypatch.setattr(resources, "_TOPOLOGY", tmp_path / "missing")
    assert resources.share([9, 3, 5, 7], 1, 2) == {7, 9}


MPICH = {"TNT_LOCAL_RANK_FROM": "RANK", "RANK": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"TNT_LOCAL_RANK_FROM": "RANK", "RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {"TNT_LOCAL_RANK_FROM": "RANK", "RANK": "1", "TNT_RANKS_PER_NODE": "2"}
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
        (4, {**BIND, **SLURM}, {2, 3}, "2"),
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
    resources.take_share(environ)
    assert chosen == ([] if share is None else [share])
    assert environ["TF_NUM_INTRAOP_THREADS"] == threads
    assert environ["OMP_NUM_THREADS"] == threads


@pytest.mark.mpi
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("python", PYTHONS)
def test_ranks_of_a_job_run_on_cores_of_their_own(python):
    options = ["-n", "2", "--threads", str(CORES // 2), "--output-on-all-devices"]
    told = tarantella(python, *options, "share.py").ends(0).stdout
    ranks = [set(found.split()) for found in re.findall("cores (.*)", told)]
    assert len(ranks) == 2
    assert ranks[0].isdisjoint(ranks[1])
    assert len(ranks[0] | ranks[1]) == CORES


GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.mark.parametrize(
    ("given", "local_rank", "taken"),
    [
        ({}, 0, "0"),
        ({}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, 2, "7"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, 1, "GPU-cd"),
        ({"TNT_SHARE_GPUS": "1"}, 5, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 1, "0"),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, 0, "0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 3, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 3, None),
        ({"CUDA_VISIBLE_DEVICES": "-1,0"}, 3, None),
    ],
)
def test_each_rank_of_a_host_takes_one_of_its_two(given, local_rank, taken, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(resources, "_DEVICES", tmp_path)
    for name in ("null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = dict(given)
    resources.take_gpu(environ, local_rank)
    changed = {"CUDA_VISIBLE_DEVICES": taken} if taken else {}
    assert environ == {**(GROWTH if taken else {}), **given, **changed}
    if taken and len(given) < 2 and "TNT_SHARE_GPUS" not in given:
        with pytest.raises(LaunchError, match=r"at least 10 ranks.* or TNT_SHARE_GPUS=1"):
            resources.take_gpu(dict(given), 9)


def test_a_loaded_tensorflow_is_told_and_gpus_in_use_are_not_shared_silently(monkeypatch):
    config = mock.Mock()
    monkeypatch.setitem(sys.modules, "tensorflow", mock.Mock(config=config))
    config.list_physical_devices.return_value = ["GPU:0", "GPU:1"]
    resources.take_gpu({}, 1)
    config.set_visible_devices.assert_called_once_with(["GPU:1"], "GPU")
    config.experimental.set_memory_growth.assert_called_once_with("GPU:1", True)
    with pytest.raises(LaunchError, match="at least 3 ranks"):
        resources.take_gpu({}, 2)
    config.set_visible_devices.side_effect = RuntimeError("cannot be modified any more")
    with pytest.raises(LaunchError, match=r"Call tarantella_pp\.init\(\) before"):
        resources.take_gpu({}, 0)
    config.list_physical_devices.return_value = []
    resources.take_gpu({}, 0)
