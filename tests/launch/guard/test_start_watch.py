"""Ranks of plain `mpiexec` that wait for one which does not come to start MPI."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import PYTHONS, mpiexec

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("python", PYTHONS)]


@pytest.mark.parametrize(
    ("how", "limit", "text"),
    [
        pytest.param(
            "exit0", "60", "1 of the 2 processes of the job on host", marks=pytest.mark.slow
        ),
        ("sleep", "2", "gives up (TNT_TIMEOUT=2;"),
    ],
)
def test_a_rank_that_never_starts_mpi_ends_the_job(
    python: str, how: str, limit: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNT_TIMEOUT", limit)
    monkeypatch.setenv("TNT_WARN", "1")
    with mpiexec(python, 2, "absent.py", how) as job:
        result = job.result()
        assert not job.wait_until_gone(seconds=3)
    assert result.code != 0
    assert "a rank waits at absent.py:" in result.stderr
    assert "for 1 s by now" in result.stderr
    assert text in result.stderr
    assert result.seconds < 20
