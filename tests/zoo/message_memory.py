"""How much memory messages have at a time, for tests and benchmarks."""

import weakref

from tarantella_pp.runtime.comm import buffers, messages

SMALLEST = 128 << 10  # logs and indices are smaller, and not planned


class MessageMemory:
    """Makes the memory for messages of this process from now on, and counts it."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._make = buffers.aligned_memory
        buffers.aligned_memory = messages.aligned_memory = self._counted

    def _counted(self, nbytes: int) -> buffers.Bytes:
        memory = self._make(nbytes)
        if nbytes >= SMALLEST:
            self._add(nbytes)
            weakref.finalize(memory.base, self._add, -nbytes)
        return memory

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)
