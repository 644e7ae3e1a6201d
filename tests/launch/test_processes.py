"""Removing what the processes of a job have shared, and how they ended in words."""

from __future__ import annotations

import mmap
import pathlib
import signal
import time
import uuid

from tarantella_pp.launch import processes


def test_shared_memory_is_removed_once_nobody_has_mapped_it():
    stem = f"/dev/shm/mpich_shm_test{uuid.uuid4().hex}"
    path, other = pathlib.Path(f"{stem}_0"), pathlib.Path(f"/dev/shm/test-{uuid.uuid4().hex}")
    start = time.time() - 1.0
    try:
        other.touch()
        with path.open("w+b") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 0):
                processes.remove_unused_shared_memory(start)
                assert path.exists()
        processes.remove_unused_shared_memory(time.time() + 60)
        assert path.exists()
        processes.remove_unused_shared_memory(start)
        assert not path.exists()
        assert other.exists()
    finally:
        for file in (path, other):
            file.unlink(missing_ok=True)


def test_an_exit_is_described():
    assert processes.describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert processes.describe_exit(3) == "ended with exit code 3"
    assert processes.describe_exit(-63) == "killed by signal 63"
