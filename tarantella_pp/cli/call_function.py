"""`tnt.run`: calls a function on several ranks, from a notebook or any other Python process.

Function and result travel through memory without a name, so that no kill leaves a file behind::

    this process                                 the last of the ranks, or all
    function, arguments   -- /proc/PID/fd/A -->  called
    result                <-- /proc/PID/fd/B --  returned
    exception             <-- /proc/PID/fd/C --  what `tarantella` says of the first failure
    cell, terminal        <-- pipes -----------  printed, as `tarantella` shows it
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError, LaunchError, checked_count
from tarantella_pp.launch.mpi_launchers import find_launcher
from tarantella_pp.launch.processes import die_with_parent, sweep
from tarantella_pp.launch.records import RANK_VARIABLE, SIZE_VARIABLE, number_from

# How long a job may take to end that is interrupted here.
_END_SECONDS = 15.0
# The first argument of this file where a rank runs it; the job's own process has a number.
_CALLED = "called"


def run(function: Callable[..., Any], ranks: int = 4, *args: Any) -> Any:
    """Calls a function on several ranks of this host, and returns what the last rank returns.

    It does for a cell of a notebook what `tarantella -n 4 -- train.py` does for a script: the same
    ranks, threads and output, with one progress bar. An interrupt ends all ranks.

    Args:
        function: What each rank calls. It may be defined in a cell or in `__main__`; what it
            refers to goes with it, so let it make its model and read its data itself.
        ranks: Number of ranks.
        *args: What it is called with.

    Returns:
        What the function returns on the last rank, which must be possible to pickle.

    Raises:
        ConfigurationError: If the function or an argument cannot be pickled, or this process is a
            rank itself.
        LaunchError: If there is no MPI, or a rank fails; the message is that of the first failure.

    Example::

        def train(epochs):
            model = tnt.PipelineModel(build_model(), num_stages=2)
            model.compile("adam", "mse")
            return model.fit(x, y, epochs=epochs).history

        history = tnt.run(train, 2, 10)
    """
    count = checked_count("ranks", ranks)
    if int(os.environ.get(SIZE_VARIABLE, "1")) > 1:
        raise ConfigurationError(
            f"This process is one of {os.environ[SIZE_VARIABLE]} ranks already. Call "
            f"{function!r} itself, or start the script with `python`."
        )
    call = _pickled(function, args)
    find_launcher("auto")
    with _memory(call) as given, _memory() as found, _memory() as said:
        if _run_job(count, given, found, said):
            trace, _, line = said.read().decode().strip().rpartition("\n")
            raise LaunchError(f"{line.removeprefix('tarantella: ')}\n\n{trace}".strip())
        if not (result := found.read()):
            raise LaunchError("The last rank has ended before the function returned (sys.exit?).")
        return pickle.loads(result)  # noqa: S301 - our own ranks wrote it


def _pickled(function: Any, args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    if not callable(function):
        raise ConfigurationError(f"Expected a function. Received: function={function!r}")
    try:
        return bytes(cloudpickle.dumps((function, args)))
    except Exception as error:
        raise ConfigurationError(
            f"Function and arguments cannot be sent to ranks ({type(error).__name__}: {error}). "
            f"Received: function={function!r}. Let it open files and make locks, generators and "
            "whatever else belongs to a process itself."
        ) from error


def _memory(content: bytes = b"") -> IO[bytes]:
    file = os.fdopen(os.memfd_create("tarantella"), "w+b")
    file.write(content)
    file.flush()
    return file


def _run_job(ranks: int, *files: IO[bytes]) -> int:
    """Runs the job to its end, also an early one; returns its exit code."""
    terminal = getattr(sys.stdout, "isatty", bool)() or "ipykernel" in sys.modules
    numbers = (os.getpid(), ranks, *(file.fileno() for file in files))
    job = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # an interrupt comes from here, and once
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path))),
            "TNT_TERMINAL": str(int(terminal)),
        },
    )
    try:
        _show(job)
    except BaseException:
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=_END_SECONDS)
        raise
    finally:
        job.kill()  # its ranks end with it
        job.communicate()
        sweep()
    return job.returncode


def _show(job: subprocess.Popen[bytes]) -> None:
    """Passes on what the ranks of a job print, as it comes, until the job has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as pipes:
        for pipe, stream in ((job.stdout, sys.stdout), (job.stderr, sys.stderr)):
            pipes.register(pipe, selectors.EVENT_READ, (stream, decoder("replace")))  # type: ignore[arg-type]
        while pipes.get_map():
            for key, _ in pipes.select():
                stream, text = key.data
                piece = text.decode(read := os.read(key.fd, 1 << 16), final=not read)
                if not read:
                    pipes.unregister(key.fileobj)
                if stream is not None:
                    stream.write(piece)
                    stream.flush()
    job.wait()


def _start() -> int:
    """The job's own process, which ends when the one that has called `run` is gone."""
    parent, ranks, *numbers = sys.argv[1:]
    # Ignored in what `nohup` or a shell starts in the background, and so here: nothing would end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(int(parent), signal.SIGINT)
    *paths, said = [f"/proc/{parent}/fd/{number}" for number in numbers]
    call = ["-n", ranks, "--", "-m", "tarantella_pp.cli.call_function", _CALLED, *paths]
    with open(said, "w", errors="backslashreplace") as ours, contextlib.redirect_stderr(ours):
        return main(call)


def _called(given: str, found: str) -> None:
    """What a rank runs: calls the function in one file; the last rank writes into the other."""
    try:
        with open(given, "rb") as file:
            function, args = pickle.load(file)  # noqa: S301 - `tnt.run` has written it
    except FileNotFoundError as error:
        raise LaunchError(
            "tnt.run calls a function on ranks of this host only. Start a script on several hosts "
            "with `tarantella`."
        ) from error
    result = function(*args)
    size = int(os.environ[SIZE_VARIABLE])
    if size == 1 or number_from(RANK_VARIABLE) == size - 1:
        import cloudpickle

        try:
            text = cloudpickle.dumps(result)
            pickle.loads(text)  # noqa: S301 - as the caller will
        except Exception as error:
            raise LaunchError(
                f"What the function returns cannot be sent back ({type(error).__name__}: {error}). "
                "Return arrays, numbers, texts, lists and dicts of them."
            ) from error
        with open(found, "wb") as file:
            file.write(text)


if __name__ == "__main__":
    if sys.argv[1] == _CALLED:
        _called(*sys.argv[2:])
    else:
        sys.exit(_start())
