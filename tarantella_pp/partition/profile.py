"""What was measured of a model's operations: seconds and bytes, as data; goes to JSON and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph


class NodeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one operation takes, for each of the profile's numbers of rows."""

    name: str  # name of the node
    forward: tuple[float, ...]  # seconds of its forward pass
    backward: tuple[float, ...]  # seconds of its backward pass, both gradients
    # Bytes that it keeps for its backward pass if it is alone on a stage; `None` where TensorFlow
    # cannot say
    residual_bytes: tuple[int, ...] | None = None


class Profile(JsonRecord, frozen=True, tag_field="format", tag="tarantella_pp.profile"):
    """Seconds and bytes of every operation of a model, measured on one machine.

    Attributes:
        model: Name of the model.
        fingerprint: Fingerprint of its layer graph.
        threads: Threads that each operation had.
        rows: Samples of the micro-batches that were measured, ascending.
        nodes: The operations, in the order of the graph.
        version: Version of the format.
    """

    noun: ClassVar[str] = "profile"

    model: str
    fingerprint: str
    threads: int
    rows: tuple[int, ...]
    nodes: tuple[NodeProfile, ...]
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together."""
        for problem in _problems(self):
            raise PlanError(f"This is no valid profile: {problem}")

    def seconds(self, rows: int) -> tuple[tuple[float, float], ...]:
        """Returns seconds, forward and backward, of each operation for some rows."""
        return tuple(
            (_at(rows, self.rows, node.forward), _at(rows, self.rows, node.backward))
            for node in self.nodes
        )

    def check(self, graph: LayerGraph) -> None:
        """Raises a `PlanError` if the profile is one of another model than this layer graph's."""
        if self.fingerprint != graph.fingerprint():
            raise PlanError(
                f"This is a profile of another model, '{self.model}' with {len(self.nodes)} "
                f"operations; this one has {len(graph.nodes)}."
            )

    def apply(self, graph: LayerGraph) -> LayerGraph:
        """Puts measured bytes into those operations of a graph whose bytes are guesses."""
        nodes = [
            msgspec.structs.replace(
                node,
                keeps=(),
                operations=(),
                residual_bytes=measured.residual_bytes[-1] / self.rows[-1],
                residual_source="measured",
            )
            if node.residual_source == "estimated" and measured.residual_bytes is not None
            else node
            for node, measured in zip(graph.nodes, self.nodes, strict=True)
        ]
        return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _at(rows: int, sizes: tuple[int, ...], values: tuple[float, ...]) -> float:
    """The value at a number of rows, from those at one or more others."""
    if len(sizes) == 1:
        return values[0] * rows / sizes[0]
    (low, first), (high, last) = itertools.islice(zip(sizes, values, strict=True), 2)
    slope = max(0.0, (last - first) / (high - low))
    return max(0.0, last + slope * (rows - high))


def _problems(profile: Profile) -> Iterator[str]:
    sizes = profile.rows
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or len(sizes) > 2:
        yield f"rows must be one or two numbers, ascending. Received: {list(sizes)}"
    for i, node in enumerate(profile.nodes):
        kinds = [node.forward, node.backward, node.residual_bytes]
        for values in kinds:
            wrong = values is not None and len(values) != len(sizes)
            if wrong or not all(0 <= value < math.inf for value in values or ()):
                yield f"nodes[{i}] must have a finite number for each of its rows."
