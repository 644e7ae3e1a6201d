"""What holds for every test: its backend, few threads, nothing left behind, an end in sight.

With pytest-xdist this is imported in the process that was started, which runs no tests then, and
in its workers, which do. Each has a mark and a clock of its own.
"""

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import settings

from tests.helpers.startup import sitecustomize

# Before any test module can import Keras or TensorFlow, and for every process that a test starts.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
for _name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# For every process that a test starts; in this one it has been imported.
_STARTUP = str(Path(sitecustomize.__file__).parent)
if _STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    _paths = filter(None, [os.environ.get("PYTHONPATH"), _STARTUP])
    os.environ["PYTHONPATH"] = os.pathsep.join(_paths)

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
_PROFILE = "ci" if os.environ.get("CI") else "default"
settings.load_profile(_PROFILE)

SESSION_SECONDS = float(os.environ.get("TNT_TEST_SESSION_SECONDS", "4500"))
"""A session that takes longer hangs, and is ended."""
QUICK_EXAMPLES = 25
"""Of each property in a session without slow tests, instead of a hundred."""
MOST_WORKERS = 4
"""More would need more memory than a small machine has: each loads TensorFlow."""

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # set in workers only
# Inherited by every process of the session, so that those are found whose parents are gone. The
# mark of a worker begins with that of the process that started it, so that this finds them all.
_MARK = "TNT_TEST_SESSION"
_MINE = f"{os.environ[_MARK]}{_WORKER}/" if _WORKER else f"{os.getpid()}/"
os.environ[_MARK] = _MINE


def processes_of_session() -> list[psutil.Process]:
    """Returns the processes that tests of this process, or of its workers, have started."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(_MARK, "").startswith(_MINE) and process.pid != os.getpid()
            # Python's own helper lives as long as the process that started it.
            if ours and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Shares the tests among the cores, but for single files, which one process has sooner."""
    option = config.option
    if _WORKER or not hasattr(option, "numprocesses"):  # or without pytest-xdist
        return
    whole = all(Path(name).is_dir() for name in option.file_or_dir)
    if option.numprocesses is None and whole and not (option.usepdb or option.collectonly):
        cores = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        option.numprocesses = cores if cores > 1 else None
    if option.numprocesses and option.dist == "no":
        # Neighbours stay together as long as possible, and share what they have computed.
        option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Sets the number of examples, and the clock that ends a session that hangs with its stacks."""
    if "not slow" in config.option.markexpr:
        few = settings(settings.get_profile(_PROFILE), max_examples=QUICK_EXAMPLES)
        settings.register_profile("quick", few)
        settings.load_profile("quick")
    stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")  # pytest captures the other one
    # The process with workers ends them only after they have had the time to show their stacks.
    seconds = SESSION_SECONDS + (40 if config.getoption("numprocesses", None) else 0)

    def end() -> None:
        name = f" in worker {_WORKER}" if _WORKER else ""
        stderr.write(f"\nThe tests take longer than {SESSION_SECONDS:g} s{name}: ended.\n")
        stderr.flush()
        faulthandler.dump_traceback(stderr)
        _kill(processes_of_session())
        os._exit(3)

    clock = threading.Timer(seconds, end)
    clock.daemon = True
    clock.start()
    # A thread that waits with the interpreter's lock held stops the clock, but not this one.
    faulthandler.dump_traceback_later(seconds + 30, exit=True, file=stderr)


def pytest_collection_finish() -> None:
    """Leaves what test files have loaded, TensorFlow above all, out of all later collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Ends what tests have left that crashed with their worker, before anything could see it."""
    _kill(processes_of_session())


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails the last test of the session if a process that some test started still runs."""
    yield
    if "tests.helpers.mpi" in sys.modules:
        sys.modules["tests.helpers.mpi"].end_fork_servers()
    _, left = psutil.wait_procs(processes_of_session(), timeout=10)
    names = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    _kill(left)
    if names:
        pytest.fail("processes left behind by the tests:\n" + "\n".join(names))


@pytest.fixture(scope="module", autouse=True)
def _types_are_set_back() -> Iterator[None]:
    """Fails in the file that leaves Keras in another type, not in one that comes later."""
    yield
    keras = sys.modules.get("keras")
    if keras is not None and keras.config.floatx() != "float32":
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        pytest.fail("the tests of this file leave keras.config.floatx() other than float32")


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Has Keras compute in float64, in which what is promised can be told from rounding."""
    from tests.helpers.training import in_precision

    with in_precision("float64", "float64"):
        yield


@pytest.fixture
def untried() -> Iterator[None]:
    """Has pipelines, on ranks too, not try their stages out, which takes as long as training.

    Tests of probes, of all that Keras has, of patterns and of models on ranks try out all kinds.
    """
    from tarantella_pp.runtime.rank_stages import RankStages

    tries = mock.patch.object(RankStages, "is_due", return_value=False)
    with tries, mock.patch.dict(os.environ, {"TNT_TEST_UNTRIED": "1"}):
        yield
