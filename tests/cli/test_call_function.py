"""`tnt.run`: what a function returns on ranks, and that nothing of it stays behind."""

import os
import signal
import site
import subprocess
import sys
import threading
import time

import pytest

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch.records import SIZE_VARIABLE
from tests.conftest import processes_of_session

pytestmark = pytest.mark.mpi


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def test_the_last_rank_returns_prints_and_fails_for_all(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    factor = 3

    def product(number):
        print(f"on rank {tnt.get_rank()}{sys.stdin.read()}")
        if number < 0:
            sys.stderr.write("Traceback (most recent call last): of one that was caught\n")
            raise ValueError(f"no such number: {number}")
        return tnt.get_rank(), tnt.get_size(), factor * number

    assert tnt.run(product, 2, 7) == (1, 2, 21)
    assert capsys.readouterr().out == "on rank 1\n"
    with pytest.raises(LaunchError, match=r"(?s)^rank \d of 2.*ValueError: no such.*Traceback"):
        tnt.run(product, 2, -1)
    assert "Traceback (most recent call last): of one that was caught\n" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    for makes in (threading.Lock, lambda: Odd(1, 2)):  # the second is pickled, but not read
        with pytest.raises(LaunchError, match=r"cannot be sent back \(TypeError: .*Return arrays"):
            tnt.run(makes, 1)
    with pytest.raises(LaunchError, match="before the function returned"):
        tnt.run(sys.exit, 2)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print, 0), "ranks=0"),
        ((print, "2"), "ranks='2'"),
        ((3,), "function=3"),
        ((print, 2, threading.Lock()), "cannot be sent to ranks.*lock"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigurationError, match=message):
        tnt.run(*arguments)


def test_it_needs_mpi_and_is_not_for_ranks(monkeypatch):
    monkeypatch.setenv(SIZE_VARIABLE, "2")
    with pytest.raises(ConfigurationError, match="one of 2 ranks already"):
        tnt.run(print)
    monkeypatch.delenv(SIZE_VARIABLE)
    monkeypatch.setenv("PATH", "")
    for name in ("exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, "/nowhere")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    with pytest.raises(LaunchError, match="mpiexec"):
        tnt.run(print)


CALLS = """
import time
import tarantella_pp as tnt

def wait():
    tnt.barrier()
    print("up", flush=True)
    time.sleep(60)

tnt.run(wait, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_caller_leaves_nothing_behind(number, tmp_path):
    before = processes_of_session()  # which other tests keep

    def left():
        return [process for process in processes_of_session() if process not in before]

    caller = subprocess.Popen(
        [sys.executable, "-c", CALLS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # An interrupt as from a terminal; else ignored, as in what a shell starts with `&`.
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN
        ),
    )
    try:
        assert caller.stdout.readline() == b"up\n"
        assert len(left()) > 3
        caller.send_signal(number)
        assert caller.wait(20) != 0
        end = time.monotonic() + 20
        while left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not left()
        assert not [*tmp_path.iterdir()]
    finally:
        caller.kill()
