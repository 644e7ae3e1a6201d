"""Starts MPI ranks for tests: a script, or a function of a test module, on several ranks.

    def program(number):               # at the top level of the test module
        return world().rank + number   # anything that JSON can hold

    assert mpi_run(3, program, 5).results == [5, 6, 7]

Nothing outlives the call: when the time is up, or the launcher has gone, every process of the
job is killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
# Pythons to repeat MPI tests with, each in an environment with another MPI.
PYTHONS = (sys.executable, *filter(None, os.environ.get("TNT_TEST_PYTHONS", "").split(os.pathsep)))


@dataclass
class MpiRun:
    returncode: int  # -9 if the time was up
    stdout: str
    stderr: str
    results: list[Any]
    timed_out: bool

    def check(self) -> MpiRun:
        """Returns the run if all ranks ended well; fails with their output otherwise."""
        if self.returncode or self.timed_out:
            how = "timed out" if self.timed_out else f"exit code {self.returncode}"
            raise AssertionError(f"{how}\n{self.stdout[-4000:]}\n{self.stderr[-8000:]}")
        return self


@functools.cache
def find_mpiexec(python: str = sys.executable) -> tuple[str, ...] | None:
    """Returns the command that starts ranks of the MPI beside `python`, or of that on the PATH."""
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return None
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    if any(name in version.stdout for name in ("Open MPI", "OpenRTE", "PRRTE", "prte")):
        root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        return (mpiexec, *root, "--oversubscribe", "--bind-to", "none")
    return (mpiexec,)


def mpi_run(
    ranks: int,
    program: Callable[..., Any] | Path | str,
    *arguments: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
) -> MpiRun:
    """Runs a function at the top of a module (JSON in and out) or a script on several ranks."""
    mpiexec = find_mpiexec(python)
    if mpiexec is None:
        raise FileNotFoundError("no mpiexec beside this Python or on the PATH")
    with tempfile.TemporaryDirectory(prefix="tnt-test-") as directory:
        if callable(program):
            call = [program.__code__.co_filename, program.__qualname__, directory]
            script = [__file__, *call, json.dumps(arguments)]
        else:
            script = [str(program), *map(str, arguments)]
        start = _fork_servers().client if python == sys.executable else [python]
        returncode, stdout, stderr, timed_out = _run(
            [*mpiexec, "-n", str(ranks), *start, *script], timeout, _environment(python, env)
        )
        paths = [Path(directory) / f"{rank}.json" for rank in range(ranks)]
        results = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return MpiRun(returncode, stdout, stderr, results, timed_out)


class ForkServers:
    def __init__(self) -> None:
        file = Path(__file__).with_name("fork_server.py")
        names = [f"tnt-test-{os.getpid()}-{i}" for i in range(2)]
        self.client = [sys.executable, "-I", "-S", str(file), ",".join(names)]
        self._servers = [self._started(file, name) for name in names]

    def _started(self, file: Path, name: str) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)  # Linux frees such a name itself
            listener.listen()  # so that clients can ask while the server still loads TensorFlow
            return subprocess.Popen(
                [sys.executable, str(file), "serve", str(listener.fileno())],
                stdin=subprocess.PIPE,
                env=_environment(sys.executable, None),
                pass_fds=[listener.fileno()],
            )

    def end(self) -> None:
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers:
            server.wait()


@functools.cache
def _fork_servers() -> ForkServers:
    return ForkServers()


def end_fork_servers() -> None:
    """Ends the processes that this one has started to fork ranks; they end with it, too."""
    if _fork_servers.cache_info().currsize:
        _fork_servers().end()
        _fork_servers.cache_clear()


def _environment(python: str, env: dict[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Open MPI keeps sockets under TMPDIR, whose names must not be long.
    fixed = {"PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
    return {**os.environ, **fixed, **(env or {})}


def _run(
    command: list[str], timeout: float, environment: dict[str, str]
) -> tuple[int, str, str, bool]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
            start_new_session=True,
        )  # fmt: skip
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_all(process)
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read(), timed_out


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills the launcher and its descendants, those in process groups of their own included."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return functools.reduce(getattr, name.split("."), module)


def _main(file: str, name: str, directory: str, arguments: str) -> None:
    from tarantella_pp.runtime.comm.communicator import world
    from tarantella_pp.runtime.rank_stages import RankStages

    if "TNT_TEST_UNTRIED" in os.environ:
        RankStages.is_due = lambda *_: False  # type: ignore[method-assign]
    ranks = world()
    try:
        result = _load(file, name)(*json.loads(arguments))
    except BaseException:
        traceback.print_exc()
        ranks.abort(1)
        raise
    target = Path(directory) / f"{ranks.rank}.json"
    target.write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
