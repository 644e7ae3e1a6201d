"""Whether a partition problem makes sense, and its options as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from tarantella_pp.errors import GraphError, PlanError

if TYPE_CHECKING:
    from tarantella_pp.partition.solvers.problem.problem import (
        FloatArray,
        IntArray,
        Problem,
    )


def costs(name: str, values: ArrayLike, count: int) -> FloatArray:
    """Reads the costs of nodes."""
    array = np.array(values, dtype=np.float64)
    if array.shape != (count,):
        raise GraphError(f"`{name}` has one number for each node. Received: shape {array.shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        where = int(np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[0])
        raise GraphError(
            f"`{name}` of node {where} must be finite and not negative. Received: {array[where]}"
        )
    array.flags.writeable = False
    return array


def check_options(problem: Problem, objectives: tuple[str, ...]) -> None:
    """Checks the options of a problem."""
    if isinstance(problem.num_stages, bool) or problem.num_stages < 1:
        raise PlanError(f"A pipeline has at least one stage. Received: {problem.num_stages=}")
    if problem.objective not in objectives:
        raise PlanError(f"`objective` is one of {objectives}. Received: {problem.objective!r}")
    values = problem.group_bytes
    if len(values) not in (0, len(problem.groups)) or any(not 0 <= v < 1e300 for v in values):
        raise PlanError(f"`group_bytes` has one number for each group. Received: {values}")


def apart(problem: Problem, ties: tuple[str, ...]) -> tuple[bool, ...]:
    """Reads which groups may part."""
    tied = problem.tied
    each = [tied for _ in problem.groups] if isinstance(tied, str) else list(tied)
    named = {tied} if isinstance(tied, str) else set(each)
    if len(each) != len(problem.groups) or not named <= set(ties):
        raise PlanError(f"`tied` is one of {ties}, or one for each group. Received: {tied!r}")
    return tuple(one == "free" for one in each)


def check_tensors(problem: Problem) -> None:
    """Checks the tensors and groups of a problem."""
    n = problem.num_nodes
    for index, tensor in enumerate(problem.tensors):
        producer = () if tensor.producer is None else (tensor.producer,)
        if any(not 0 <= node < n for node in (*tensor.nodes, *producer)):
            raise GraphError(f"Tensor {index} names a node outside 0..{n - 1}. Received: {tensor}")
        if producer and tensor.producer not in tensor.nodes:
            raise GraphError(f"Tensor {index} lacks its producer among its nodes: {tensor}")
        if any(not 0 <= v < 1e300 for v in (tensor.comm, tensor.bytes, tensor.receive_bytes)):
            raise GraphError(f"Tensor {index} has a negative or infinite cost: {tensor}")
    for group in problem.groups:
        if any(not 0 <= node < n for node in group):
            raise GraphError(f"A group names a node outside 0..{n - 1}. Received: {group}")


def in_flight(problem: Problem) -> FloatArray:
    """Reads how many micro-batches each stage holds."""
    S = problem.num_stages
    flight = np.ones(S) if problem.in_flight is None else np.array(problem.in_flight, float)
    if flight.shape != (S,) or not np.isfinite(flight).all() or (flight < 0).any():
        raise PlanError(
            f"`in_flight` has one count for each of the {S} stages. Received: {problem.in_flight}"
        )
    return flight


def limits(problem: Problem) -> FloatArray | None:
    """Reads the memory limits."""
    if problem.memory_limit is None:
        return None
    limits = np.array(problem.memory_limit, dtype=np.float64)
    if limits.ndim == 0:
        limits = np.full(problem.num_stages, float(limits))
    if limits.shape != (problem.num_stages,) or not (limits > 0).all():
        raise PlanError(
            "`memory_limit` is one positive number of bytes, or one for each stage. "
            f"Received: {problem.memory_limit}"
        )
    return limits


def precedence(problem: Problem) -> IntArray:
    """Lists which node comes before which."""
    n = problem.num_nodes
    if problem.edges is None:
        pairs = [
            (tensor.producer, node)
            for tensor in problem.tensors
            if tensor.producer is not None
            for node in tensor.nodes
            if node != tensor.producer
        ]
        return np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2)
    edges = np.array(problem.edges, dtype=np.int64).reshape(-1, 2)
    if len(edges) and (edges.min() < 0 or edges.max() >= n or (edges[:, 0] == edges[:, 1]).any()):
        raise GraphError(f"An edge leaves 0..{n - 1} or returns to its own node.")
    return np.unique(edges, axis=0)
