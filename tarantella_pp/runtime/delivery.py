"""A message on its way to another rank."""

from __future__ import annotations

from typing import Any

from tarantella_pp.runtime.memory import Bytes


class Delivery:
    """A message on its way out; keeps its memory alive until MPI has read all of it."""

    __slots__ = ("_memory", "_requests", "dest", "label", "nbytes", "tag")

    def __init__(self, label: str, dest: int, tag: int) -> None:
        self.label = label
        self.dest = dest
        self.tag = tag
        self.nbytes = 0
        self._memory: list[Bytes] = []
        self._requests: list[Any] = []

    def add(self, data: Bytes, request: Any) -> None:
        """Adds a piece that `request` sends."""
        self.nbytes += data.size
        self._memory.append(data)
        self._requests.append(request)

    def done(self) -> bool:
        """Whether the memory may change again."""
        while self._requests:
            if not self._requests[-1].Test():
                return False
            self._requests.pop()
        return True

    def expectation(self) -> str:
        """Returns what a wait for this message waits for."""
        return f"the arrival of {self}"

    def __str__(self) -> str:
        return f"{self.label or 'a message'} to rank {self.dest} (tag {self.tag})"
