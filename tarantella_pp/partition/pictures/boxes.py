"""The boxes of a layer graph: what stands in them, and what one reads when pointing at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.graph import Node
from tarantella_pp.partition.pictures.folding import title
from tarantella_pp.partition.pictures.words import count, flops, shorten
from tarantella_pp.partition.sizes import format_bytes

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
    """Makes the box of one operation.

    Args:
        name: Its name.
        index: Its position in the plan.
        node: What the layer graph knows of it; `None` without one.
    """
    text = shorten(name, TITLE_CHARACTERS)
    if node is None:
        return Box(text, f"operation {index}", f"{name}\noperation {index}")
    size = _size([node])
    note = " · ".join([shorten(node.kind, NOTE_CHARACTERS - sum(3 + len(s) for s in size)), *size])
    work = [f"{flops(node.flops)} per sample"] if node.flops else []
    return Box(text, note, "\n".join([name, node.kind, *(f"weights {s}" for s in size), *work]))


def run_box(names: Sequence[str], run: range, nodes: Sequence[Node]) -> Box:
    """Makes the box of a run of operations.

    Args:
        names: Name of each operation of the stage.
        run: Positions of the run among them.
        nodes: What the layer graph knows of the run; empty without one.
    """
    shown = [names[i] for i in run][:16]
    more = [f"and {len(run) - len(shown)} more"] if len(run) > len(shown) else []
    note = " · ".join([count(len(run), "operation"), *_size(nodes)])
    return Box(title(names, run, TITLE_CHARACTERS), note, "\n".join(shown + more), "run")


def ends_box(names: Sequence[str], role: str) -> Box:
    """Makes the box of the model's inputs that a stage reads, or of its outputs.

    Args:
        names: Their names.
        role: `"input"` or `"output"`.
    """
    note = role if len(names) == 1 else count(len(names), role)
    text = title(names, range(len(names)), TITLE_CHARACTERS - 1)
    return Box(text, note, "\n".join([*names[:16], note]), "end")


def _size(nodes: Sequence[Node]) -> list[str]:
    """The size of the weights, where there are any."""
    size = sum(node.parameters + node.constants for node in nodes)
    return [format_bytes(size)] if size else []
