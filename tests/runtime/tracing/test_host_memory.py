"""The memory that a rank may take."""

from __future__ import annotations

import psutil
import pytest

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.tracing import host_memory

HOST = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("named", "files", "expected"),
    [
        ("0::/a/b", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b", {"memory.max": "700", "a/b/memory.max": "5000"}, 700),
        ("5:cpu:/x\n4:memory:/job", {"memory/job/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, HOST),
        ("0::/elsewhere", {}, HOST),
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
    assert host_memory.memory_of_host(proc, tmp_path / "groups") == expected


@pytest.mark.parametrize(("others", "expected"), [(700, 300), (200, 200)])
def test_ranks_of_a_host_share_it_and_the_smallest_share_holds(monkeypatch, others, expected):
    class Three(Communicator):
        def allgather_json(self, value):
            return [value, value, "elsewhere" if isinstance(value, str) else others]

    monkeypatch.setattr(host_memory, "memory_of_host", lambda: 600)
    assert host_memory.memory_of_each_rank(Three()) == expected
