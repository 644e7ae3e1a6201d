"""Stages that a user gives as numbers of layers, as torchgpipe's `balance` does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.layer_graph import LayerGraph

GIVEN = "given"
"""What a plan is balanced by whose stages were given."""


def is_given(balance: Any) -> bool:
    """Whether an option `balance` is numbers of layers."""
    return isinstance(balance, Iterable) and not isinstance(balance, str)


def assignment_of(graph: LayerGraph, balance: Iterable[Any]) -> tuple[int, ...]:
    """Returns the stage of each node.

    Numbers count the model's own layers, in order, a nested model as one. Where they add up to
    something else, they may count operations; or, where layers are numbered by name (`l0`,
    `l1_conv`, `l1_add` ...), these numbers.
    """
    counts = [int(n) if hasattr(n, "__index__") and n is not True else n for n in balance]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise ConfigurationError(
            "Expected 'memory', 'time', 'flops', or a positive number of layers for each stage. "
            f"Received: balance={counts}"
        )
    places, ends = _places(graph, counts), list(itertools.accumulate(counts))
    stages = tuple(next(s for s, end in enumerate(ends) if place < end) for place in places)
    _check(graph, stages, counts)
    return stages


def _places(graph: LayerGraph, counts: Sequence[int]) -> list[int]:
    """Returns the place of each node among the things counted."""
    names = [node.name.partition("/")[0] for node in graph.nodes]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    if sum(counts) == len(order):
        return [order[name] for name in names]
    if sum(counts) == len(names):
        return list(range(len(names)))
    found = [re.search(r"\d+", name) for name in names]
    numbers = [int(match[0]) for match in found if match]
    if len(numbers) == len(names) and max(numbers) + 1 == sum(counts):
        return numbers
    raise ConfigurationError(
        f"Numbers of layers must add up to the model's {len(order)} layers, or its {len(names)} "
        f"operations. Received: balance={list(counts)}, which adds up to {sum(counts)}"
    )


def _check(graph: LayerGraph, stages: Sequence[int], counts: Sequence[int]) -> None:
    """Refuses stages that are empty, run backwards, or part what must stay together."""
    empty = sorted(set(range(len(counts))) - set(stages))
    if empty:
        raise ConfigurationError(
            f"Stages {empty} would have no operations. Received: balance={list(counts)}"
        )
    for before, after in graph.digraph.edges:
        if stages[before] > stages[after]:
            raise ConfigurationError(
                f"'{graph.nodes[after].name}' on stage {stages[after]} needs "
                f"'{graph.nodes[before].name}', which would be on the later stage "
                f"{stages[before]}. Received: balance={list(counts)}"
            )
    for group in graph.groups:
        if len({stages[node] for node in group}) > 1:
            raise ConfigurationError(
                f"{sorted(graph.nodes[node].name for node in group)} share statistics or seeds, so "
                f"they must be on one stage. Received: balance={list(counts)}"
            )
