"""The boxes of a layer graph: what stands in them, and what one reads when pointing at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.graph.layer_graph import Node
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.visualization.canvas.labels import (
    count,
    flops,
    shorten,
)
from tarantella_pp.partition.visualization.graph_drawing.folding import title

TITLE_CHARACTERS, NOTE_CHARACTERS = 23, 27
"""What fits in a box."""


@dataclass(frozen=True, slots=True)
class Box:
    """One box: an operation, a run of them, or the inputs or outputs of the model.

    Attributes:
        title: First line.
        note: Second line.
        hover: All of it.
        role: `"layer"`, `"run"` or `"end"`.
    """

    title: str
    note: str
    hover: str
    role: str = "layer"


def layer_box(name: str, index: int, node: Node | None) -> Box:
    """Makes the box of one operation."""
    text = shorten(name, TITLE_CHARACTERS)
    if node is None:
        return Box(text, f"operation {index}", f"{name}\noperation {index}")
    size = _size([node])
    note = " · ".join([shorten(node.kind, NOTE_CHARACTERS - sum(3 + len(s) for s in size)), *size])
    work = [f"{flops(node.flops)} per sample"] if node.flops else []
    return Box(text, note, "\n".join([name, node.kind, *(f"weights {s}" for s in size), *work]))


def run_box(names: Sequence[str], run: range, nodes: Sequence[Node]) -> Box:
    """Makes the box of a run of operations."""
    shown = [names[i] for i in run][:16]
    more = [f"and {len(run) - len(shown)} more"] if len(run) > len(shown) else []
    note = " · ".join([f"{len(run)} ops", *_most_work(nodes)])
    hover = [*shown, *more, *(f"weights {size}" for size in _size(nodes))]
    text = title(names, run, TITLE_CHARACTERS)
    return Box(text, shorten(note, NOTE_CHARACTERS), "\n".join(hover), "run")


def ends_box(names: Sequence[str], role: str) -> Box:
    """Makes the box of the model's inputs that a stage reads, or of its outputs."""
    note = role if len(names) == 1 else count(len(names), role)
    text = title(names, range(len(names)), TITLE_CHARACTERS - 1)
    return Box(text, note, "\n".join([*names[:16], note]), "end")


def _most_work(nodes: Sequence[Node]) -> list[str]:
    """The kind of layer that does most of the arithmetic, and how many of it there are."""
    work = Counter[str]()
    for node in nodes:
        work[node.kind] += int(node.flops)
    kinds = Counter(node.kind for node in nodes)
    return [f"{kinds[kind]} {kind}" for kind, _ in work.most_common(1)]


def _size(nodes: Sequence[Node]) -> list[str]:
    """The size of the weights, where there are any."""
    size = sum(node.parameters + node.constants for node in nodes)
    return [format_bytes(size)] if size else []
