"""Starts `tarantella` and `mpiexec` for tests, with an end in sight and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
import uuid
from typing import Any

import psutil

from tests.helpers.mpi import PYTHONS as PYTHONS
from tests.helpers.mpi import ROOT, find_mpiexec

SCRIPTS = ROOT / "tests" / "launch" / "scripts"
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers" / "startup")])
"""Where Python finds the package, the tests, and what it runs first."""
LIMIT_SECONDS = 40.0
MARK = "TNT_TEST_JOB"


@dataclasses.dataclass
class Result:
    code: int
    stdout: str
    stderr: str
    seconds: float


def _as_from_a_terminal() -> None:
    """Has signals end the command that these tests were started to ignore, as by `nohup`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A command that may start processes of its own; all are killed on leaving the block."""

    def __init__(self, *command: str, stdin: Any = None, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        self._process = subprocess.Popen(
            command,
            cwd=SCRIPTS,
            env={**inherited, "PYTHONPATH": PYTHONPATH, MARK: self._mark, **environment},
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
            preexec_fn=_as_from_a_terminal,
        )  # fmt: skip
        self._start = time.monotonic()
        self._seen = ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes():
            process.kill()
        self._process.kill()
        self._process.communicate()

    def wait_until_ready(self) -> None:
        """Returns once rank 0 has written that all ranks have met."""
        assert self._process.stderr is not None
        while "ready" not in self._seen:  # reads no more than there is, which `result` would miss
            piece = os.read(self._process.stderr.fileno(), 4096)
            assert piece, f"ended before it was ready: {self._seen}"
            self._seen += piece.decode(errors="replace")
        self._start = time.monotonic()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def result(self, limit: float = LIMIT_SECONDS) -> Result:
        """Waits some seconds for the end of the command, and of all that it started."""
        stdout, stderr = self._process.communicate(timeout=limit)
        seconds = time.monotonic() - self._start
        return Result(self._process.returncode, stdout, self._seen + stderr, seconds)

    def ends(self, code: int, *said: str) -> Result:
        """Waits for the end, and checks what is said then; no process may be left."""
        with self:
            result = self.result()
            assert not self.processes()
        assert result.code == code, result.stderr
        for text in said:
            assert text in result.stderr
        return result

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def wait_until_gone(self, seconds: float) -> list[psutil.Process]:
        """Returns the processes that are still there after some time."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False


def executable(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes a file that can be run; returns it."""
    path.write_text(text)
    path.chmod(0o700)
    return path


def tarantella(python: str, *arguments: str, **environment: Any) -> Job:
    return Job(python, "-m", "tarantella_pp", *arguments, **environment)


def mpiexec(python: str, num_ranks: int, *arguments: str) -> Job:
    """Starts a script the way users do without the launcher."""
    return Job(*find_mpiexec(python), "-n", str(num_ranks), python, *arguments)


def slurm_allocation(python: str, calls: pathlib.Path, **more: str) -> dict[str, str]:
    acted = ROOT / "tests" / "launch" / "slurm_bin"
    folders = [str(acted), str(pathlib.Path(python).parent), os.environ["PATH"]]
    return {
        "PATH": os.pathsep.join(folders),
        "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "3", "SRUN_CALLS": str(calls),
        "SRUN_MPIEXEC": " ".join(find_mpiexec(python)), **more,
    }  # fmt: skip
