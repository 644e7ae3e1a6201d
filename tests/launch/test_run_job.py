"""A job whose ranks are acted by a script, for what real ones seldom do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.helpers.jobs import ROOT

PROGRAM = """
    import os, sys
    from tarantella_pp.launch import run_job
    from tarantella_pp.launch.hosts import HostRanks
    from tarantella_pp.launch.mpi_launchers import Mpich
    run_job.SHUTDOWN_SECONDS = run_job.CLOSING_SECONDS = 1.0
    run_job.START_SECONDS = 3.0
    command, hosts = [sys.executable, "-c", sys.argv[1]], [HostRanks(h, 0, 2) for h in sys.argv[2:]]
    with run_job.JobRun(Mpich("mpiexec"), 2, hosts=hosts) as job:
        sys.exit(job.run(command, dict(os.environ)))
"""
ACTOR = """
import os, sys, time
from tarantella_pp.launch.records import write
def say(rank, state, **changes):
    write(2, rank, state=state, **changes)
"""
FAILS = "say(0, 'failed', cause='c', details='text\\n', exit_code=9)"


@pytest.mark.parametrize(
    ("acts", "code", "message"),
    [
        ("say(0, 'finished'); say(1, 'finished'); sys.exit(3)", 0, ""),
        ("say(0, 'finished'); say(1, 'finished'); time.sleep(60)", 0, "did not end after its"),
        ("say(0, 'finished'); say(1, 'returned'); time.sleep(60)", 1, "ranks [1] did not leave"),
        ("say(0, 'finished'); sys.exit(0)", 1, "ended with exit code 0, but ranks [1] never"),
        ("say(0, 'started'); say(1, 'started'); sys.exit(3)", 3, "still at work (MPI_Abort?)"),
        ("say(0, 'started'); os.kill(os.getpid(), 9)", 1, "killed by SIGKILL, but ranks [1]"),
        (f"{FAILS}; sys.exit(0)", 9, "text\ntarantella: rank 0 of 2 on host"),
        (f"{FAILS}; say(1, 'failed', cause='later', exit_code=8)", 9, "failed first: c"),
        (f"say(1, 'failed', cause='MPI', unexplained=True); {FAILS}", 9, "failed first: c"),
        ("say(0, 'failed', exit_code=75, stopped=True); time.sleep(60)", 75, "by SIGTERM"),
        ("say(0, 'failed', exit_code=75); time.sleep(60)", 75, "rank 0 of 2 on host"),
        ("say(0, 'returned'); say(1, 'started', starts_mpi='a.py:3'); time.sleep(60)", 1, "a.py:3"),
    ],
)
def test_records_count_not_the_exit_code_of_mpiexec(acts, code, message):
    check(acts, code, message)


@pytest.mark.parametrize(
    ("acts", "hosts", "message"),
    [
        pytest.param(
            *("say(0, 'started'); time.sleep(60)", (), "ranks [1] did not start within 3 s"),
            marks=pytest.mark.slow,
        ),
        ("time.sleep(60)", ("own",), "ranks [0, 1] did not start within 3 s; `tarantella doctor"),
        pytest.param(
            "time.sleep(2); say(0, 'started'); time.sleep(2); say(1, 'started'); sys.exit(5)",
            ("own",),
            "still at work",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_do_not_start_end_the_job(acts, hosts, message):
    check(acts, 5 if "exit(5)" in acts else 1, message, *hosts)


def test_a_host_whose_remote_shell_has_ended_is_dead():
    """MPICH's launcher would wait for its ranks for ever."""
    acts = "import subprocess; say(0, 'started'); say(1, 'started'); "
    acts += "subprocess.Popen(['sh', '-c', 'sleep 2; exit 255', 'far']); time.sleep(60)"
    check(acts, 1, "failed first: the remote shell of its host has ended: far or the link", "far")


def test_signals_that_are_ignored_stay_so():
    """As under `nohup`, and in the background of a shell without job control."""
    acts = "say(0, 'started'); os.kill(os.getppid(), 1); os.kill(os.getppid(), 2); time.sleep(1)\n"
    acts += "say(1, 'failed', cause='its own', exit_code=9); sys.exit(9)"
    ignoring = (
        "import os, sys, signal\n    for number in (1, 2): signal.signal(number, signal.SIG_IGN)"
    )
    check(acts, 9, "its own", program=PROGRAM.replace("import os, sys", ignoring, 1))


@pytest.mark.slow
def test_nobody_need_read_what_the_launcher_says(tmp_path):
    """As behind `2>&1 | head`: the job ends as it would, and is cleaned up."""
    acts = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{FAILS}; time.sleep(60)"
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), ACTOR + acts]
    assert subprocess.run(program, cwd=ROOT, stderr=writer, timeout=30, check=False).returncode == 9
    os.close(writer)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def check(acts: str, code: int, message: str, *hosts: str, program: str = PROGRAM) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), ACTOR + acts, *hosts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert answer.returncode == code, answer.stderr
    assert message in answer.stderr
    assert bool(message) == bool(answer.stderr)
