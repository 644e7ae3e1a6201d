"""Runs of operations that share a box, so that a stage of any size fits a column."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.partition.visualization.canvas.labels import (
    common_prefix,
    shared_prefix,
    shorten,
)


def fold(names: Sequence[str], crossing: Sequence[int], most: int) -> list[range]:
    """Cuts a sequence of operations into runs.

    A run ends where few tensors cross and the names change early, so that runs tend to be the
    blocks that a model is made of.
    """
    total = len(names)
    least = -(-total // most)
    runs = []
    start = 0
    while start < total:
        ends = range(start + least, min(start + 2 * least, total + 1))
        if least == 1 or not ends:
            end = min(start + least, total)
        else:
            end = min(ends, key=lambda e: _badness(names, crossing, e))
        runs.append(range(start, end))
        start = end
    return runs


def _badness(names: Sequence[str], crossing: Sequence[int], end: int) -> tuple[int, int]:
    """How little it suits that a run ends before this position."""
    if end == len(names):
        return (0, 0)
    return (crossing[end - 1], len(common_prefix(names[end - 1 : end + 1])))


def title(names: Sequence[str], run: range, most: int) -> str:
    """Names a run: its operation, the block that it is, or the operation that it begins with."""
    if len(run) == 1:
        return shorten(names[run.start], most)
    prefix = shared_prefix([names[i] for i in run])
    beside = [names[i] for i in (run.start - 1, run.stop) if 0 <= i < len(names)]
    if len(prefix) > 1 and not any(name.startswith(prefix) for name in beside):
        return f"{shorten(prefix[:-1], most - 2)} …"
    return f"{shorten(names[run.start], most - 2)} …"
