"""Our tensor channel against raw MPI: ping-pong between two ranks, 4 KB to 256 MB.

    tarantella -n 2 -- benchmarks/runtime/messages.py

The `mpiexec` of the MPI in use starts it, too.
Both sides are measured in turns in the same run; the table has the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tarantella_pp.runtime.comm.buffers import Bytes, aligned_memory
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec, world

SIZES = tuple(4096 << shift for shift in range(17))
TURNS = 3


@dataclass(frozen=True)
class Row:
    """Medians for one size, in seconds for one way of one message."""

    nbytes: int
    raw: float
    ours: float
    raw_fresh: float

    @property
    def bandwidth_ratio(self) -> float:
        """Our bandwidth as a share of the raw one."""
        return self.raw / self.ours


def tensor(nbytes: int) -> Bytes:
    """Memory as TensorFlow has it; where it starts in a cache line tells in the copy's speed."""
    memory = aligned_memory(nbytes)
    memory[:] = 1
    return memory


def raw_exchange(comm: Any, mpi: Any, nbytes: int, fresh: bool) -> Callable[[], None]:
    """Raw MPI: Isend and Irecv with MPI's own waits, into one buffer or a fresh one each time."""
    out, kept = tensor(nbytes), tensor(nbytes)
    peer = 1 - comm.rank

    def send() -> None:
        comm.Isend((out, mpi.BYTE), peer, 1).Wait()

    def receive() -> None:
        comm.Irecv((aligned_memory(nbytes) if fresh else kept, mpi.BYTE), peer, 1).Wait()

    return in_turns(comm.rank, send, receive)


def our_exchange(ranks: Communicator, nbytes: int) -> Callable[[], None]:
    """Our channel; what was received is dropped at once, as a stage does after its use."""
    out, specs = [tensor(nbytes)], [TensorSpec((nbytes,), "uint8")]
    peer = 1 - ranks.rank

    def send() -> None:
        ranks.send(out, peer, 2, label="ping-pong")

    def receive() -> None:
        ranks.post_receive(specs, peer, 2, label="ping-pong").wait()
        ranks.progress()

    return in_turns(ranks.rank, send, receive)


def in_turns(
    rank: int, send: Callable[[], None], receive: Callable[[], None]
) -> Callable[[], None]:
    """One message there and one back."""
    first, second = (send, receive) if rank == 0 else (receive, send)

    def exchange() -> None:
        first()
        second()

    return exchange


def timed(exchange: Callable[[], None], repetitions: int) -> list[float]:
    """Seconds for one way, once for each repetition."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        exchange()
        times.append((time.perf_counter() - start) / 2)
    return times


def measure(ranks: Communicator, nbytes: int) -> Row:
    """Medians over all turns, ours and raw one after the other."""
    from mpi4py import MPI

    repetitions = max(3, min(400, (256 << 20) // nbytes))
    exchanges = {
        "raw": raw_exchange(MPI.COMM_WORLD, MPI, nbytes, fresh=False),
        "ours": our_exchange(ranks, nbytes),
        "raw_fresh": raw_exchange(MPI.COMM_WORLD, MPI, nbytes, fresh=True),
    }
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for _ in range(TURNS):
        for name, exchange in exchanges.items():
            ranks.barrier()
            timed(exchange, 2)
            times[name] += timed(exchange, repetitions)
            ranks.flush()
    return Row(nbytes, **{name: statistics.median(values) for name, values in times.items()})


def as_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title)
    for heading in ("size", "raw, us", "ours, us", "more, us", "raw, GB/s", "ours, GB/s",
                    "ours / raw", "raw into fresh memory, GB/s"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        size = f"{row.nbytes >> 10} KiB" if row.nbytes < 1 << 20 else f"{row.nbytes >> 20} MiB"
        table.add_row(
            size,
            f"{row.raw * 1e6:.1f}",
            f"{row.ours * 1e6:.1f}",
            f"{(row.ours - row.raw) * 1e6:+.1f}",
            f"{row.nbytes / row.raw / 1e9:.2f}",
            f"{row.nbytes / row.ours / 1e9:.2f}",
            f"{row.bandwidth_ratio:.2f}",
            f"{row.nbytes / row.raw_fresh / 1e9:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="in bytes")
    arguments = parser.parse_args()
    ranks = world()
    if ranks.size != 2:
        parser.error(f"2 ranks are needed. Received: {ranks.size}")
    rows = [measure(ranks, nbytes) for nbytes in SIZES if nbytes <= arguments.largest]
    if ranks.rank == ranks.size - 1:
        from mpi4py import MPI

        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        Console(width=110).print(as_table(rows, f"Messages between two ranks, {library}"))
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
