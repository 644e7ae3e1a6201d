"""A wire between two hosts, with a speed and a delay: for kernels that have no netem.

    python benchmarks/training/relay.py MBIT MS

makes the network devices `tnt-link-0` and `tnt-link-1` and says so in a line; what one of them is
given comes out of the other. It ends with its standard input. A packet has up to 64 KiB, so that
1 Gbit/s are 2,000 of them a second in each direction, which take a tenth of a core.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import threading
import time
from collections import deque

_CREATE, _PLAIN = 0x400454CA, 0x1001
"""TUNSETIFF; packets of IP without a header before them."""
_LARGEST = 1 << 16


def device(name: str) -> int:
    """Makes a network device, and returns a descriptor of its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _CREATE, struct.pack("16sH14x", name.encode(), _PLAIN))
    return descriptor


def carry(source: int, target: int, bytes_per_second: float, delay: float) -> None:
    """Passes packets on, one after the other, until a host is gone."""
    under_way: deque[tuple[float, bytes]] = deque()
    free = 0.0
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.perf_counter())
        if select.select([source], [], [], wait)[0]:
            try:
                packet = os.read(source, _LARGEST)
            except OSError:
                return
            free = max(free, time.perf_counter()) + len(packet) / bytes_per_second
            under_way.append((free + delay, packet))
        while under_way and under_way[0][0] <= time.perf_counter():
            with contextlib.suppress(OSError):  # nobody is there yet
                os.write(target, under_way.popleft()[1])


def main(mbit: str, milliseconds: str) -> None:
    ends = device("tnt-link-0"), device("tnt-link-1")
    for source, target in (ends, ends[::-1]):
        speed = float(mbit) * 1e6 / 8, float(milliseconds) / 1e3
        threading.Thread(target=carry, args=(source, target, *speed), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
