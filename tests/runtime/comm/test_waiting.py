"""What moves on while a rank computes, and what must not."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tarantella_pp.errors import CommunicationError, ConfigurationError
from tarantella_pp.runtime.comm.communicator import TensorSpec, world
from tarantella_pp.runtime.comm.waiting import BackgroundProgress, is_wanted
from tests.helpers.mpi import PYTHONS, find_mpiexec, mpi_run

SECONDS = 20


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_a_computation_ends_after_the_poll_that_has_begun() -> None:
    begun, go_on, events = threading.Event(), threading.Event(), []

    def poll() -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        events.append("polled")

    with BackgroundProgress(lambda: True, poll):
        assert begun.wait(SECONDS)
        threading.Timer(0.05, go_on.set).start()
    events.append("went on")
    assert events == ["polled", "went on"]


def test_an_error_of_a_poll_is_one_of_the_computation() -> None:
    def poll() -> None:
        polls.append(1)
        raise CommunicationError("not what was expected")

    def compute(then: type[Exception] | None = None) -> None:
        before = len(polls)
        with moved:
            assert eventually(lambda: len(polls) > before)
            time.sleep(0.01)
            if then is not None:
                raise then

    polls: list[int] = []
    moved = BackgroundProgress(lambda: True, poll)
    with pytest.raises(CommunicationError, match="not what was expected"):
        compute()
    assert polls == [1]
    with pytest.raises(ZeroDivisionError):  # the computation's own error comes first
        compute(ZeroDivisionError)


def test_whether_it_is_wanted_can_be_said() -> None:
    assert is_wanted(True, {})
    assert not is_wanted(False, {"TNT_PROGRESS": " "})
    assert is_wanted(False, {"TNT_PROGRESS": "1"})
    assert not is_wanted(True, {"TNT_PROGRESS": "0"})
    with pytest.raises(ConfigurationError, match="Received: TNT_PROGRESS='yes'"):
        is_wanted(True, {"TNT_PROGRESS": "yes"})


def sum_while_computing() -> list[bool]:
    """A sum in two rounds, and messages, get on while ranks do nothing but compute."""
    ranks = world()
    array = np.arange(1 << 20, dtype=np.float32)
    request = ranks.start_allreduce(array + ranks.rank, label="gradients")
    with ranks.computing():
        moved = eventually(lambda: request._awaited is None)
    right = np.array_equal(request.wait(), 2 * array + 1)
    other = 1 - ranks.rank
    received = ranks.post_receive([TensorSpec(array.shape, array.dtype)], other, 7)
    sent = ranks.send([array], other, 7)
    with ranks.computing():
        gone = eventually(lambda: not sent.requests)
    return [moved, right, gone, np.array_equal(received.wait()[0], array)]


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")
@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS)
def test_ranks_that_compute_move_their_sums_and_messages_on(python: str) -> None:
    env = {"TNT_PROGRESS": "1", "TNT_TIMEOUT": "20"}
    run = mpi_run(2, sum_while_computing, env=env, python=python).check()
    assert run.results == [[True] * 4] * 2
