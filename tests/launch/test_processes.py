"""Killing what a process has started, and removing what that shared."""

from __future__ import annotations

import json
import mmap
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest

from tarantella_pp.launch import processes
from tests.helpers.jobs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program apart, whose children are its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )


def test_orphans_in_sessions_of_their_own_are_killed():
    program = """
        import json, subprocess, sys, time, psutil
        from tarantella_pp.launch.processes import adopt_orphans
        from tarantella_pp.launch.processes import kill_descendants
        adopt_orphans()
        shell = "setsid sleep 60 & setsid sh -c 'trap \\"\\" TERM INT; sleep 60' & sleep 0.2"
        subprocess.run(["sh", "-c", shell], check=True, stdout=subprocess.DEVNULL)
        before = [child.pid for child in psutil.Process().children(recursive=True)]
        print(json.dumps([before, kill_descendants()]))
    """
    before, left = json.loads(run(program).stdout)
    assert len(before) == 3
    assert not left
    assert not any(psutil.pid_exists(pid) for pid in before)


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


def test_a_process_dies_with_its_parent():
    program = """
        import os, signal, sys, time
        from tarantella_pp.launch.processes import die_with_parent
        parent = os.getpid()
        ready, done = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(1)
            die_with_parent(parent)
            os.write(done, b"x")
            time.sleep(60)
        os.read(ready, 1)
        print(child, flush=True)
        os._exit(0)
    """
    child = int(run(program).stdout)
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def test_an_exit_is_described():
    assert processes.describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert processes.describe_exit(3) == "ended with exit code 3"
    assert processes.describe_exit(-63) == "killed by signal 63"


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
