"""A batch as one rank has it, and what each rank needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary
from tarantella_pp.runtime.weights.process_groups import BatchShare, ProcessGroups


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    Attributes:
        rows: Number of samples, of all replicas.
        shares: The share of each replica.
        share: The share of this rank's replica.
        inputs: The model inputs that this rank's stages use, by position among all inputs: the
            samples of its replica.
        y: The targets of all samples, on the last rank of each pipeline; elsewhere `None`.
        sample_weight: The weights of the samples likewise.
        targets: Description of `y` and of `sample_weight`, on every rank.
        signature: Names the structure, shapes and dtypes of the batch, but for its rows.
    """

    rows: int
    shares: Sequence[BatchShare]
    share: BatchShare
    inputs: Mapping[int, tf.Tensor]
    y: Any
    sample_weight: Any
    targets: tuple[Any, Any]
    signature: bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank gets of each batch.

    Attributes:
        inputs: The positions of the model inputs that it uses.
        replica: Its replica, whose samples it gets.
        targets: Whether it gets targets and sample weights.
    """

    inputs: tuple[int, ...]
    replica: int = 0
    targets: bool = False

    @property
    def any(self) -> bool:
        """Whether it gets anything."""
        return bool(self.inputs) or self.targets


def inputs_of_stages(boundaries: Sequence[StageBoundary], graph: LayerGraph) -> list[list[int]]:
    """For each stage, the positions of the model inputs that it uses."""
    places = {tensor: i for i, tensor in enumerate(graph.inputs)}
    return [[places[port.tensor] for port in boundary.model_inputs] for boundary in boundaries]


def needs_of_ranks(
    inputs: Sequence[Sequence[int]], placement: Sequence[int], groups: ProcessGroups
) -> list[Need]:
    """What each rank of the job gets of each batch."""
    used: list[set[int]] = [set() for _ in range(groups.pipeline.size)]
    for rank, places in zip(placement, inputs, strict=True):
        used[rank].update(places)
    needs = {
        rank: Need(tuple(sorted(used[position])), replica, targets=position == placement[-1])
        for replica, ranks in enumerate(groups.world_ranks)
        for position, rank in enumerate(ranks)
    }
    return [needs[rank] for rank in sorted(needs)]
