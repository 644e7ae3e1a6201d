"""Memory and links of a machine."""

import time
from unittest import mock

import psutil
import pytest

from tarantella_pp.internals.training import Gpu
from tarantella_pp.runtime.comm import machine


@pytest.mark.parametrize(
    ("bandwidth", "latency", "found"), [(1.2e8, 4e-3, 4e-3), (1e12, 0.01, 0.009)]
)
def test_latency_and_bandwidth_are_told_apart(bandwidth, latency, found, monkeypatch):
    link, now = mock.Mock(rank=0, size=2), [0.0]

    def wait():
        (array,), *_ = link.send.call_args.args
        now[0] += latency + array.nbytes / bandwidth

    link.post_receive.return_value.wait = link.send.return_value.wait = wait
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    measured, waited = machine.measure_link(link)
    assert waited == pytest.approx(found, abs=1e-6)
    large = machine.LARGE
    assert waited + large / measured == pytest.approx(latency + large / bandwidth)
    assert {machine.magnitude(speed) for speed in (0.8e8, 1.2e8, 2.9e8)} == {1e8}


HOST = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("named", "files", "expected"),
    [
        ("0::/a/b", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("5:cpu:/x\n4:memory:/job", {"memory/job/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, HOST),
        (None, {}, HOST),
    ],
    ids=str,
)
def test_the_smallest_limit_of_all_control_groups_holds(tmp_path, named, files, expected):
    proc = tmp_path / "cgroup"
    if named is not None:
        proc.write_text(named + "\n")
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert machine.memory_of_host(proc, tmp_path / "groups") == expected


FIRST, SECOND = Gpu("device: 0, pci bus id: 01", 900), Gpu("device: 0, pci bus id: 02", 500)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", None, 600), ("a", None, 600), ("b", None, 200)], 200),
        ([("a", FIRST, 600), ("a", SECOND, 600), ("b", FIRST, 600)], 500),
        ([("a", FIRST, 600), ("a", None, 600), ("a", None, 600)], 300),
    ],
    ids=["hosts", "GPUs", "with and without"],
)
def test_ranks_of_a_device_share_it_and_the_smallest_share_holds(monkeypatch, ranks, expected):
    places = [[host, gpu.name if gpu else ""] for host, gpu, _ in ranks]
    shares = [
        (gpu.nbytes if gpu else memory) // places.count(place)
        for place, (_, gpu, memory) in zip(places, ranks, strict=True)
    ]
    told = [places, shares]
    for rank, (host, gpu, memory) in enumerate(ranks):
        three = mock.Mock()
        three.allgather_json.side_effect = told
        monkeypatch.setattr(machine.socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(machine, "memory_of_host", lambda memory=memory: memory)
        assert machine.memory_of_each_rank(three, gpu) == expected
        assert [call.args[0] for call in three.allgather_json.mock_calls] == [t[rank] for t in told]
