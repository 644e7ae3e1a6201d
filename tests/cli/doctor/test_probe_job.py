"""The job that measures ends, whatever becomes of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tarantella_pp.cli.doctor import probe_job
from tarantella_pp.cli.doctor.probe_job import Link

LINE = '{"pair": [0, 1], "latency_us": 2.0, "bandwidth_gb_per_s": 3.0}'


def test_a_launcher_that_does_not_end_is_killed_and_what_it_said_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text(
        f"#!/bin/sh\ntrap '' TERM\necho noise\necho '{LINE}'\nwhile :; do sleep 0.1; done\n"
    )
    stuck.chmod(0o700)
    monkeypatch.setattr(probe_job.sys, "executable", str(stuck))
    monkeypatch.setattr(probe_job, "MORE_SECONDS", 0.5)
    monkeypatch.setattr(probe_job, "_END_SECONDS", 0.5)
    start = time.monotonic()
    found = probe_job.probe([], [0, 1, 2], 0.5)
    assert time.monotonic() - start < 30
    assert found == probe_job.Probed({(0, 1): Link(2.0, 3.0)}, {}, "exit code -9")


def test_what_the_launcher_says_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\necho 'some noise' >&2\necho 'tarantella: no way' >&2\nexit 3\n")
    fails.chmod(0o700)
    monkeypatch.setattr(probe_job.sys, "executable", str(fails))
    assert probe_job.probe([], [0, 1], 30).why == "no way"
