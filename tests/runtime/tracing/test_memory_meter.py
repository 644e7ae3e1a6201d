from __future__ import annotations

import numpy as np
import pytest

from tarantella_pp.runtime.tracing.memory_meter import STATUS, MemoryMeter

pytestmark = pytest.mark.keras
MIB = 2**20


def says(status, now, peak):
    status.write_text(f"Name:\tpython\nVmHWM:\t{1024 * peak} kB\nVmRSS:\t{1024 * now} kB\n")


def test_it_counts_what_was_taken_since_and_the_variables(tmp_path):
    status = tmp_path / "status"
    says(status, now=100, peak=180)
    meter = MemoryMeter(held=30 * MIB, status=status)
    says(status, now=60, peak=180)  # less than there was before: known is only that
    assert (meter.peak().bytes, meter.peak().exact) == (110 * MIB, False)
    says(status, now=60, peak=200)
    assert (meter.peak().bytes, meter.peak().exact) == (130 * MIB, True)


def test_other_systems_say_nothing(tmp_path):
    assert MemoryMeter(status=tmp_path / "missing").peak() is None
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert MemoryMeter(status=tmp_path / "status").peak() is None


@pytest.mark.skipif(not STATUS.exists(), reason="not Linux")
@pytest.mark.slow
def test_memory_of_this_process():
    meter = MemoryMeter()
    size = int(STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024  # more than ever before
    np.ones(size, np.uint8)
    peak = meter.peak()
    assert peak.exact
    assert size - MIB < peak.bytes < size + 64 * MIB
