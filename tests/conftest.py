"""What holds for every test: its backend, few threads, nothing left behind, an end in sight."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# Before any test module can import Keras or TensorFlow, and for every process that a test starts.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
for _name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

SESSION_SECONDS = float(os.environ.get("TNT_TEST_SESSION_SECONDS", "2100"))
"""A session that takes longer hangs, and is ended."""

# Inherited by every process of the session, so that those are found whose parents are gone.
_MARK = ("TNT_TEST_SESSION", str(os.getpid()))
os.environ[_MARK[0]] = _MARK[1]


def processes_of_session() -> list[psutil.Process]:
    """Returns the processes that tests have started and that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(_MARK[0]) == _MARK[1] and process.pid != os.getpid()
            # Python's own helper lives as long as the process that started it.
            if ours and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue


def pytest_configure(config: pytest.Config) -> None:
    """Sets the clock that ends a session that hangs, with the stacks of all threads."""
    stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")  # pytest captures the other one

    def end() -> None:
        stderr.write(f"\nThe tests take longer than {SESSION_SECONDS:g} s: ended.\n")
        stderr.flush()
        faulthandler.dump_traceback(stderr)
        _kill(processes_of_session())
        os._exit(3)

    clock = threading.Timer(SESSION_SECONDS, end)
    clock.daemon = True
    clock.start()
    # A thread that waits with the interpreter's lock held stops the clock, but not this one.
    faulthandler.dump_traceback_later(SESSION_SECONDS + 30, exit=True, file=stderr)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails the last test of the session if a process that some test started still runs."""
    yield
    _, left = psutil.wait_procs(processes_of_session(), timeout=10)
    names = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    _kill(left)
    if names:
        pytest.fail("processes left behind by the tests:\n" + "\n".join(names))
