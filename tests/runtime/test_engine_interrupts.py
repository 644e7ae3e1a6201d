import signal
import threading

import pytest

from tarantella_pp.runtime.engine import interrupts_put_off


@pytest.fixture(autouse=True)
def _as_in_a_terminal():
    """Ctrl-C is noticed, also where pytest was started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def work(done, presses, error=None):
    """Notes how far it gets while Ctrl-C is pressed so many times."""
    with interrupts_put_off():
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("presses", "error", "expected", "reached"),
    [
        (1, None, KeyboardInterrupt, 1),  # once the block has ended
        (2, None, KeyboardInterrupt, 1),  # the second one at once
        (1, ValueError(), ValueError, 1),  # an error comes first
    ],
)
def test_interrupts_are_put_off(presses, error, expected, reached):
    done = []
    with pytest.raises(expected):
        work(done, presses, error)
    assert len(done) == reached
    with pytest.raises(KeyboardInterrupt):  # as before
        signal.raise_signal(signal.SIGINT)


def test_other_threads_and_other_handlers_are_left_alone():
    def run():
        with interrupts_put_off():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    run()
    signal.signal(signal.SIGINT, before)
    assert found == [signal.default_int_handler, signal.SIG_IGN]
