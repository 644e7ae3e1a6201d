"""What crosses the cuts: which values each stage takes in, hands on, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tarantella_pp.partition.graph.ideals import crossings, readers
from tarantella_pp.partition.graph.layer_graph import LayerGraph


class BoundaryTensor(NamedTuple):
    """One value at the border of a stage: a tensor, or the Keras mask that belongs to it."""

    tensor: int  # id of the tensor in the layer graph
    mask: bool = False  # whether this is the tensor's mask rather than the tensor itself


def shape_and_dtype(
    graph: LayerGraph, tensor: BoundaryTensor
) -> tuple[tuple[int | None, ...], str]:
    """What a value at a border looks like."""
    described = graph.tensors[tensor.tensor]
    if tensor.mask:
        return described.mask_shape or (), "bool"
    return described.shape, described.dtype


@dataclass(frozen=True, slots=True)
class StageEdge:
    """Everything one stage sends to another for each micro-batch, in one message."""

    source: int  # stage that makes the values
    target: int  # later stage that uses them
    tensors: tuple[BoundaryTensor, ...]  # the values, in the order of the message
    gradients: tuple[BoundaryTensor, ...]  # the `tensors` whose gradient travels back, in order


@dataclass(frozen=True)
class StageBoundary:
    """The border of one stage."""

    index: int  # the stage
    nodes: tuple[int, ...]  # ids of its nodes, in topological order
    model_inputs: tuple[BoundaryTensor, ...]  # model inputs that it uses, read from the data set
    receives: tuple[StageEdge, ...]  # links that end here, by source
    sends: tuple[StageEdge, ...]  # links that begin here, by target
    # The model's outputs with their masks, on the last stage; empty elsewhere
    model_outputs: tuple[BoundaryTensor, ...]
    # Outputs that receive a gradient from a later stage
    outputs_with_gradient: tuple[BoundaryTensor, ...]
    # Tensors that travel as their logits, and what makes them of these
    activations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict, hash=False)
    # The dimension along which tensors of the model have their samples; `None` for those that have
    # none. Default: the first
    sample_axes: Mapping[int, int | None] = field(default_factory=dict, hash=False)

    def axes_of(self, values: Iterable[BoundaryTensor]) -> list[int | None]:
        """For each of some values along which dimension its samples are, if it has any."""
        return [self.sample_axes.get(value.tensor, 0) for value in values]

    @functools.cached_property
    def inputs(self) -> tuple[BoundaryTensor, ...]:
        """All values the stage takes in: model inputs first, then edge by edge."""
        received = (tensor for edge in self.receives for tensor in edge.tensors)
        return (*self.model_inputs, *received)

    @functools.cached_property
    def outputs(self) -> tuple[BoundaryTensor, ...]:
        """All values the stage hands on, each once, the model's outputs last."""
        sent = {tensor: None for edge in self.sends for tensor in edge.tensors}
        return tuple(sent | dict.fromkeys(self.model_outputs))

    @functools.cached_property
    def input_gradients(self) -> tuple[BoundaryTensor, ...]:
        """The `inputs` whose gradient the stage sends back."""
        return tuple(tensor for edge in self.receives for tensor in edge.gradients)


def stage_boundaries(
    graph: LayerGraph,
    assignment: Sequence[int],
    num_stages: int,
    activations: Mapping[int, Callable[[Any], Any]] | None = None,
) -> tuple[StageBoundary, ...]:
    """Works out the border of every stage."""
    last = num_stages - 1
    crossing: dict[tuple[int, int], list[BoundaryTensor]] = {}
    for tensor, source, targets in crossings(graph, assignment):
        for target in targets:
            crossing.setdefault((source, target), []).extend(_with_mask(graph, tensor.id))
    data: list[list[BoundaryTensor]] = [[] for _ in range(num_stages)]
    for tensor, stages in zip(graph.tensors, readers(graph, assignment), strict=True):
        for stage in stages if tensor.producer is None else ():
            data[stage].append(BoundaryTensor(tensor.id))
    edges = [
        StageEdge(*pair, tuple(tensors), tuple(t for t in tensors if _flows(graph, t)))
        for pair, tensors in sorted(crossing.items())
    ]
    results = tuple(dict.fromkeys(p for t in graph.outputs for p in _with_mask(graph, t)))
    axes = {i: tensor.sample_axis for i, tensor in enumerate(graph.tensors)}
    boundaries = []
    for stage in range(num_stages):
        sends = tuple(edge for edge in edges if edge.source == stage)
        ends = results if stage == last else ()
        outputs_with_gradient = [tensor for edge in sends for tensor in edge.gradients]
        outputs_with_gradient += [tensor for tensor in ends if _flows(graph, tensor)]
        boundaries.append(
            StageBoundary(
                index=stage,
                nodes=tuple(node for node, where in enumerate(assignment) if where == stage),
                model_inputs=tuple(data[stage]),
                receives=tuple(edge for edge in edges if edge.target == stage),
                sends=sends,
                model_outputs=ends,
                outputs_with_gradient=tuple(dict.fromkeys(outputs_with_gradient)),
                sample_axes=axes,
                activations=activations or {},
            )
        )
    return tuple(boundaries)


def _with_mask(graph: LayerGraph, tensor: int) -> tuple[BoundaryTensor, ...]:
    if graph.tensors[tensor].mask_shape is None:
        return (BoundaryTensor(tensor),)
    return BoundaryTensor(tensor), BoundaryTensor(tensor, mask=True)


def _flows(graph: LayerGraph, tensor: BoundaryTensor) -> bool:
    return not tensor.mask and graph.tensors[tensor.tensor].has_gradient


def stage_edges(boundaries: Sequence[StageBoundary]) -> tuple[StageEdge, ...]:
    """All edges of a pipeline, in an order that every rank finds alike."""
    return tuple(edge for boundary in boundaries for edge in boundary.sends)
