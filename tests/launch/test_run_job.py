"""A job whose ranks are acted by a script, for what real ones seldom do."""

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
    run_job.CLOSING_SECONDS = run_job.START_SECONDS = 3.0
    program, *names = sys.argv[1:]
    command, hosts = [sys.executable, "-c", program], [HostRanks(h, range(2)) for h in names]
    attempts = [
        run_job.Attempt(command, {**os.environ, "ATTEMPT": str(n)}, 2, hosts) for n in range(6)
    ]
    options = eval(os.environ.get("OPTIONS", "{}"))
    sys.exit(run_job.run_job(Mpich("mpiexec"), attempts, **options))
"""
ACTOR = """
import os, sys, time
from tarantella_pp.launch.records import write
def say(rank, state, **changes):
    write(2, rank, state=state, **changes)
attempt = os.environ["ATTEMPT"]
"""
BOTH_START = "import subprocess; say(0, 'started'); say(1, 'started')"
FAILS = "say(0, 'failed', cause='c', details='text\\n', exit_code=9)"


CASES = [
    ("say(0, 'finished'); say(1, 'finished'); sys.exit(3)", 0, ""),
    ("say(0, 'finished'); say(1, 'finished'); time.sleep(60)", 0, ""),
    ("say(0, 'finished'); sys.exit(0)", 1, "ended with exit code 0, but ranks [1] never"),
    ("say(0, 'started'); say(1, 'started'); sys.exit(3)", 3, "at work (MPI_Abort? Full disk?)"),
    ("say(0, 'started'); os.kill(os.getpid(), 9)", 1, "killed by SIGKILL, but ranks [1]"),
    ("import signal; signal.signal(13, 0); os.kill(os.getpid(), 13)", 141, "nobody reads its"),
    (f"{FAILS}; sys.exit(0)", 9, "text\ntarantella: rank 0 of 2 on host"),
    (f"{FAILS}; say(1, 'failed', cause='later', exit_code=8)", 9, "failed first: c"),
    (f"say(1, 'failed', cause='MPI', unexplained=True); {FAILS}", 9, "failed first: c"),
    ("say(0, 'failed', exit_code=75, stopped=True); time.sleep(60)", 75, "by SIGTERM"),
    ("say(0, 'failed', exit_code=75); time.sleep(60)", 75, "rank 0 of 2 on host"),
    ("say(0, 'started'); time.sleep(60)", 1, "ranks [1] did not start within 3 s"),
    ("time.sleep(60)", 1, "ranks [0, 1] did not start within 3 s; ssh must reach own", "own"),
    # MPICH's launcher would wait for ever for the ranks of a host that is dead.
    (
        f"{BOTH_START}; subprocess.Popen(['sh', '-c', 'sleep 2; exit 255', 'far']); time.sleep(60)",
        1, "failed first: the remote shell of its host has ended: far or the link", "far",
    ),
]  # fmt: skip


@pytest.mark.slow
def test_records_count_not_the_exit_code_of_mpiexec():
    jobs = [started(acts, *hosts) for acts, _, _, *hosts in CASES]
    for job, (_, code, message, *_) in zip(jobs, CASES, strict=True):
        check(job, code, message)


DIES = (
    "say(int(attempt) % 2, 'failed', cause='E: ' + attempt, exit_code=9, details=attempt + '\\n')"
)
# What ranks do, options, exit code, how often the job is started again, and its last words.
RESTARTED = [
    # The same failure three times in a row, of any rank, after one in another step
    (
        f"write(2, 0, step=4 + (attempt != '0')); {DIES}",
        {"restarts": 8}, 9, 3, "3 times in step 6: no restart helps. The first:\n1\ntarantella: ",
    ),
    # Of another rank each time, a kill is another failure.
    (
        "say(int(attempt) % 2, 'failed', cause='killed', exit_code=137)",
        {"restarts": 4}, 137, 4, "failed first: killed\n",
    ),
    ("say(int(attempt) % 2, 'failed', cause='exit', exit_code=2)", {"restarts": 4}, 2, 2, "helps"),
    # What a rank says of its own step counts, not what the first one has come to.
    (
        "write(2, 0, step=int(attempt)); say(1, 'failed', cause='c', exit_code=9, step=2)",
        {"restarts": 8}, 9, 2, "3 times in step 3: no restart helps.",
    ),
    (
        "say(0, 'finished'); say(1, *['failed', 'finished'][attempt == '2':][:1], cause=attempt)",
        {"restarts": 2}, 0, 2, "",
    ),
    ("say(0, 'failed', cause=attempt, exit_code=9)", {"restarts": 2}, 9, 2, "failed first: 2\n"),
    ("say(0, 'failed', exit_code=75)", {"restarts": 8}, 75, 0, "failed first: \n"),
    ("say(0, 'failed', cause='c', is_final=True)", {"restarts": 8}, 1, 0, "failed first: c\n"),
    (
        "time.sleep(2); say(0, 'failed', cause=attempt)",
        {"restarts": 8, "timeout": 3}, 124, None, "after 3 s (--timeout)",
    ),
    (
        "attempt == '1' and os.kill(os.getppid(), 15); say(0, 'failed', cause=attempt)",
        {"restarts": 8}, 75, 1, "the job was stopped by SIGTERM\n",
    ),
    ("say(0, 'failed', cause=attempt)", {"restarts": 9}, 1, 5, "no host of the job answers any"),
]  # fmt: skip


def test_a_job_that_fails_is_started_again_unless_that_would_not_help():
    jobs = [started(acts, OPTIONS=repr(options)) for acts, options, *_ in RESTARTED]
    for job, (_, _, code, restarts, words) in zip(jobs, RESTARTED, strict=True):
        _, text = job.communicate(timeout=60)
        assert job.returncode == code, text
        assert restarts in (None, text.count("tarantella: restart ")), text
        assert words in text.rpartition("tarantella: restart ")[2]


def test_signals_that_are_ignored_stay_so():
    """As under `nohup`, and in the background of a shell without job control."""
    acts = "say(0, 'started'); os.kill(os.getppid(), 1); os.kill(os.getppid(), 2); time.sleep(1)\n"
    acts += "say(1, 'failed', cause='its own', exit_code=9); sys.exit(9)"
    ignoring = (
        "import os, sys, signal\n    for number in (1, 2): signal.signal(number, signal.SIG_IGN)"
    )
    program = PROGRAM.replace("import os, sys", ignoring, 1)
    check(started(acts, program=program), 9, "its own")


def test_nobody_need_read_what_the_launcher_says(tmp_path):
    """As behind `2>&1 | head`: the job ends as it would, and is cleaned up."""
    acts = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{FAILS}; time.sleep(60)"
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), ACTOR + acts]
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    job = subprocess.Popen(program, cwd=ROOT, stderr=writer, env=buffered)
    assert job.wait(30) == 9
    os.close(writer)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def started(acts: str, *hosts: str, program: str = PROGRAM, **given: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), ACTOR + acts, *hosts]
    environment = {**os.environ, **given}
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)


def check(job: subprocess.Popen[str], code: int, message: str) -> None:
    _, text = job.communicate(timeout=30)
    assert job.returncode == code, text
    assert message in text
    assert bool(message) == bool(text)
