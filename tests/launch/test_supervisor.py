"""A job whose ranks are acted by a script, for what real ones seldom do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.helpers.jobs import ROOT

PROGRAM = """
    import os, sys
    from tarantella_pp.launch import supervisor as supervise
    supervise.SHUTDOWN_SECONDS = supervise.CLOSING_SECONDS = 1.0
    command = [sys.executable, "-c", sys.argv[1]]
    supervisor = supervise.Supervisor(num_ranks=2, shared="--shared" in sys.argv)
    sys.exit(supervisor.run(command, dict(os.environ)))
"""
ACTOR = """
import os, sys, time
from tarantella_pp.launch.guard.rank_records import Record, RunDirectory
def say(rank, state, **changes):
    record = Record.of_this_process(rank, "started").becomes(state, **changes)
    RunDirectory(os.environ["TNT_RUN_DIR"]).write(record)
"""


@pytest.mark.parametrize(
    ("acts", "code", "message"),
    [
        ("say(0, 'finished'); say(1, 'finished'); sys.exit(3)", 0, ""),
        ("say(0, 'finished'); say(1, 'finished'); time.sleep(60)", 0, "did not end after its"),
        ("say(0, 'finished'); say(1, 'returned'); time.sleep(60)", 1, "ranks [1] did not leave"),
        ("say(0, 'finished'); sys.exit(0)", 1, "ended with exit code 0, but ranks [1] never"),
        ("say(0, 'started'); say(1, 'started'); sys.exit(3)", 3, "still at work (MPI_Abort?)"),
        ("say(0, 'started'); os.kill(os.getpid(), 9)", 1, "killed by SIGKILL, but ranks [1]"),
        ("say(0, 'failed', cause='c', exit_code=9); sys.exit(0)", 9, "rank 0 of 2 on host"),
    ],
)
def test_records_count_not_the_exit_code_of_mpiexec(acts: str, code: int, message: str) -> None:
    check(acts, code, message)


@pytest.mark.parametrize(
    ("acts", "code", "message"),
    [
        ("say(0, 'finished'); sys.exit(0)", 0, "ranks [1] left no record, for their hosts do not"),
        ("sys.exit(0)", 0, "ranks [0, 1] left no record, for their hosts do not see"),
        ("say(0, 'finished'); sys.exit(4)", 4, "exit code 4, but ranks [1] left no record"),
        ("say(0, 'started'); sys.exit(0)", 1, "ended with exit code 0, but ranks [1] left no rec"),
    ],
)
def test_ranks_whose_hosts_do_not_see_the_records_may_end_well(
    acts: str, code: int, message: str
) -> None:
    check(acts, code, message, "--shared")


def check(acts: str, code: int, message: str, *options: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), ACTOR + acts, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert answer.returncode == code, answer.stderr
    assert message in answer.stderr
    assert bool(message) == bool(answer.stderr)
