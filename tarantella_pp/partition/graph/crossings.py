r"""What crosses from stage to stage: the one place where planning and running look it up.

    stage 0            stage 1            stage 2
    a ---- x ------->  b ---- y ------->  c          x crosses from 0 to 1 and 2, y from 1 to 2
           \----------------------------> c

A tensor goes straight from the stage that makes it to each stage that reads it. Outputs of the
model are read by the last stage, too, which computes the loss. Inputs of the model do not cross:
each stage that needs one gets it with the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Tensor


class Crossing(NamedTuple):
    """A tensor that is sent from one stage to later ones.

    Attributes:
        tensor: The tensor.
        source: Stage that makes it.
        targets: Stages that read it, ascending.
    """

    tensor: Tensor
    source: int
    targets: tuple[int, ...]


def crossings(graph: LayerGraph, assignment: Sequence[int]) -> list[Crossing]:
    """Returns the tensors that cross from stage to stage, in the order of the graph."""
    crossed = []
    for tensor, stages in zip(graph.tensors, readers(graph, assignment), strict=True):
        if tensor.producer is not None:
            source = assignment[tensor.producer]
            targets = tuple(stage for stage in stages if stage != source)
            if targets:
                crossed.append(Crossing(tensor, source, targets))
    return crossed


def readers(graph: LayerGraph, assignment: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the stages that read each tensor, ascending."""
    last, outputs = {max(assignment)}, set(graph.outputs)
    return [
        tuple(sorted({assignment[n] for n in t.consumers} | (last if t.id in outputs else set())))
        for t in graph.tensors
    ]
