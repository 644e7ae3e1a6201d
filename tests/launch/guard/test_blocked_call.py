"""Reading off a frame which MPI call a thread sits in."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = """
    import sys, threading, time
    from mpi4py import MPI
    from tarantella_pp.launch.guard import blocked_call as whereabouts

    class Holder:
        __slots__ = ("comm",)
        def __init__(self): self.comm = MPI.COMM_SELF
        def receive(self): self.comm.recv(source=0, tag=1)

    class Proxy:
        @property
        def comm(self):
            print("touched")
            return time

    comm, holder, proxy = MPI.COMM_SELF, Holder(), Proxy()
    empty = bytearray(8)
    calls = {
        "recv": lambda: comm.recv(source=0, tag=1),
        "lines": lambda: comm.Recv(
            [empty, MPI.BYTE],
            source=0,
        ),
        "é": lambda: "é" and MPI.COMM_SELF.recv(source=0, tag=1),
        "wait": lambda: comm.irecv(source=0, tag=1).wait(),
        "waitall": lambda: MPI.Request.Waitall([comm.Irecv([empty, MPI.BYTE], source=0)]),
        "slots": holder.receive,
        "sleep": lambda: time.sleep(60),
        "property": lambda: proxy.comm.sleep(60),
        "lock": lambda: threading.Event().wait(60),
    }
    thread = threading.Thread(target=calls[sys.argv[1]], daemon=True)
    thread.start()
    time.sleep(0.3)
    first = whereabouts.position(thread.ident)
    place = whereabouts.blocking_call(thread.ident)
    stays = first == whereabouts.position(thread.ident)
    print(place.partition(" ")[2] or "elsewhere", "stays" if stays else "moves")
    sys.stdout.flush()
    import os; os._exit(0)
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("recv", "comm.recv"),
        ("lines", "comm.Recv"),
        ("é", "MPI.COMM_SELF.recv"),
        ("wait", "comm.irecv(source=0, tag=1).wait"),
        ("waitall", "MPI.Request.Waitall"),
        ("slots", "self.comm.recv"),
        ("sleep", "elsewhere"),
        ("property", "touched\nelsewhere"),
        ("lock", "elsewhere"),
    ],
)
@pytest.mark.mpi
def test_the_call_is_found(call: str, expected: str, tmp_path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    answer = subprocess.run(
        [sys.executable, str(script), call],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert answer.stdout.strip() == f"{expected} stays", answer.stderr
