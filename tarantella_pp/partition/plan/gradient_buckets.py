"""In which portions gradients are summed over replicas, and which replica updates a weight."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence

from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import parse_bytes, wire_bytes
from tarantella_pp.partition.plan.plan_parts import FUSION_THRESHOLD

# Says how many bytes of gradients replicas sum at a time, where the script does not.
FUSION_VARIABLE = "TNT_FUSION_THRESHOLD"
# The buckets of a stage: ids of variables in `LayerGraph.weights`.
Buckets = tuple[tuple[int, ...], ...]


def fusion_threshold_of(given: int | float | str | None) -> int:
    """Reads the option `fusion_threshold`, else the environment."""
    if given is not None:
        return parse_bytes(given, "fusion_threshold")
    text = os.environ.get(FUSION_VARIABLE, "").strip()
    return parse_bytes(text, FUSION_VARIABLE) if text else FUSION_THRESHOLD


def gradient_buckets(
    graph: LayerGraph, assignment: Sequence[int], num_stages: int, fusion_threshold: int
) -> tuple[Buckets, ...]:
    """Packs the trainable variables of each stage into buckets, those used last first."""
    # Their gradients are there first:
    #     dense_1/kernel dense_1/bias dense_2/kernel ...     2A0 = (dense_2/bias, dense_2/kernel)
    #                                                        2A1 = (dense_1/bias, dense_1/kernel)
    # Buckets are of one dtype, so that they can be flat. Variables that other stages use, too, are
    # apart, in the last buckets of their first stage: their gradients are complete only once others
    # have come. A table of embeddings is alone, for its gradient may be a few rows.
    by_first_use = dict.fromkeys(weight for node in graph.nodes for weight in node.weights)
    users = graph.users(assignment)
    own: list[list[tuple[int, str, int]]] = [[] for _ in range(num_stages)]
    for w in reversed(by_first_use):
        weight = graph.weights[w]
        if weight.trainable:
            own[users[w][0]].append((w, weight.dtype, weight.bytes))
    found = []
    for weights in own:
        alone = [each for each in weights if len(users[each[0]]) == 1]
        tied = [each for each in weights if len(users[each[0]]) > 1]
        buckets = packed(alone, fusion_threshold, graph.tables)
        found.append(buckets + packed(tied, fusion_threshold, graph.tables))
    return tuple(found)


def bucket_bytes(
    graph: LayerGraph, buckets: Buckets, gradient_dtype: str | None = None
) -> tuple[int, ...]:
    """Returns the bytes of the gradients in each bucket of a stage, as they travel."""
    weights = graph.weights
    return tuple(
        sum(wire_bytes(weights[w].bytes, weights[w].dtype, gradient_dtype) for w in bucket)
        for bucket in buckets
    )


def packed(
    weights: Iterable[tuple[int, str, int]], most: int, tables: Container[int] = ()
) -> Buckets:
    """Fills a bucket of each dtype, and begins another one where a variable does not fit.

    Of each variable it takes the number, the dtype and the bytes.
    """
    buckets: list[list[int]] = []
    # The open bucket of each dtype, and the bytes that it still takes.
    room: dict[str, tuple[int, list[int]]] = {}
    for w, dtype, nbytes in weights:
        left, bucket = room.get(dtype, (-1, []))  # no open one
        if w in tables or nbytes > left:
            left, bucket = most, []
            buckets.append(bucket)
        bucket.append(w)
        if w not in tables:
            room[dtype] = (left - nbytes, bucket)
    return tuple(map(tuple, buckets))


def weight_replicas(sizes: Sequence[int], stages: Sequence[int], num_replicas: int) -> list[int]:
    """Shares the weights of each stage out to its replicas, about as many elements."""
    # Whole weights, for most optimizers look at all of one. The largest come first, each to the
    # replica with the fewest so far: none has more than 4/3 of the optimum (Graham 1969).
    found = [0] * len(sizes)
    loads = {s: [(0, 0, replica) for replica in range(num_replicas)] for s in stages}
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, replica = min(loads[stages[i]])
        found[i] = replica
        loads[stages[i]][replica] = (load + sizes[i], count + 1, replica)
    return found
