"""Scripts that use the library under plain `mpiexec`: there the guard itself ends the job."""

import pytest

from tests.helpers.jobs import PYTHONS, mpiexec

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("python", PYTHONS)]


@pytest.mark.parametrize(
    ("fault", "wait", "cause"),
    [
        ("raise", "barrier", "ValueError: a bad apple"),
        ("thread", "recv", "ZeroDivisionError"),
    ],
)
def test_a_failed_rank_ends_the_job(python, fault, wait, cause):
    with mpiexec(python, 2, "fault.py", fault, wait, "--guard") as job:
        job.wait_until_ready()
        result = job.result()
        assert not job.wait_until_gone(seconds=3)
    assert result.code != 0
    headlines = [line for line in result.stderr.splitlines() if "failed first" in line]
    assert len(headlines) == 1, result.stderr
    assert "rank 1 of 2 on host " in headlines[0]
    assert cause in headlines[0]
