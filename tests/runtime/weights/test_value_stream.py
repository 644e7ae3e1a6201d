"""What was freed goes back to the system, though the launcher has the C library keep it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tarantella_pp.launch.environment import allocator_variables

MEBIBYTES = """
import psutil, numpy
from tarantella_pp.runtime.weights.value_stream import give_back
resident = lambda: psutil.Process().memory_info().rss >> 20
kept, below = [numpy.ones(2**22) for _ in range(4)], numpy.ones(4)
before = resident()
kept.clear()
told = [before - resident()]
for freed in (2**20, 2**25):
    give_back(freed)
    told.append(before - resident())
print(*told)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others keep nothing")
def test_what_large_variables_took_goes_back_and_small_ones_cost_no_time():
    environment = {**os.environ, **allocator_variables()}
    command = [sys.executable, "-c", MEBIBYTES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    kept, small, large = map(int, run.stdout.split())
    assert kept < 16, run.stderr
    assert small < 16
    assert large > 110
