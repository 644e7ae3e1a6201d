"""The partition problem of stages that repeat their forward pass: inputs weigh, not activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.options import Settings
from tarantella_pp.partition.solvers.problem.problem import Problem, TensorCost


def recomputing(problem: Problem, costs: StageCostModel, options: Settings) -> Problem:
    """Weighs the inputs of stages, of which a recomputing one keeps all that are in flight.

    Such a stage holds its inputs once for each micro-batch in flight, and all else that its
    backward pass needs once: static memory for a solver, on which only what a stage receives is
    weighed by micro-batches, those besides the one that runs backward. This memory is never more
    than the real one, and equal to it where all stages recompute and need their inputs again
    on no parallel branches; of a stage that does not recompute it counts one micro-batch only.
    """
    graph, rows = costs.graph, costs.micro_batch_size
    readers: dict[int, set[int]] = {}
    for tensor in graph.tensors:
        readers.setdefault(graph.storage(tensor.id), set()).update(tensor.consumers)
    inputs = np.zeros(len(graph.nodes))
    received = []
    for root, nodes in readers.items():
        producer, size = graph.tensors[root].producer, rows * graph.tensors[root].bytes_per_sample
        if nodes and producer is None:
            inputs[min(nodes)] += size
        elif nodes and producer is not None:
            pins = (producer, *sorted(nodes - {producer}))
            received.append(TensorCost(producer, pins, receive_bytes=size))
    wires = [replace(tensor, receive_bytes=0.0) for tensor in problem.tensors if tensor.bytes]
    return replace(
        problem,
        static_memory=problem.static_memory + problem.activation_memory,
        activation_memory=inputs,
        tensors=(*received, *wires),
        in_flight=[
            held - 1 if stage in options.repeats else 0
            for stage, held in enumerate(options.in_flight)
        ],
    )
