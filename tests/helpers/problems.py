"""Random partition problems, and all their plans one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tarantella_pp.partition.solvers.problem.problem import Problem, TensorCost


@st.composite
def problems(draw, max_nodes=7, max_stages=4, whole=None):
    """Draws a small problem: every objective, limits, in-flight counts, groups, exactly."""
    n = draw(st.integers(1, max_nodes))
    S = draw(st.integers(1, max_stages if n < 8 else 3))
    number = st.one_of(st.just(0.0), st.integers(0, 9).map(float))
    if not whole:
        number = st.one_of(number, st.floats(0, 9, allow_nan=False, width=32))
    numbers = st.lists(number, min_size=n, max_size=n)
    edges, tensors = [], []
    for node in range(n):
        later = draw(st.lists(st.integers(node + 1, n - 1), max_size=3)) if node < n - 1 else []
        later = sorted(set(later))
        edges += [(node, after) for after in later]
        if later and draw(st.integers(0, 5)):
            comm, size, kept = draw(number), draw(number), draw(number)
            tensors.append(TensorCost(node, (node, *later), comm, size, kept))
            if draw(st.booleans()):
                # What goes back: from a later node to an earlier one, no precedence.
                tensors.append(TensorCost(None, (later[0], node), draw(number)))
    groups = []
    for _ in range(draw(st.integers(0, 2)) if n > 1 else 0):
        group = draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=3, unique=True))
        groups.append(tuple(group))
    limit = None
    if draw(st.booleans()):
        one = st.floats(1, 60)
        limit = draw(st.one_of(one, st.lists(one, min_size=S, max_size=S)))
    flight = draw(
        st.one_of(
            st.just([max(S - s, 1) for s in range(S)]),
            st.just([3] * S),
            st.lists(st.integers(0, 4), min_size=S, max_size=S),
        )
    )
    return Problem(
        num_stages=S,
        objective=draw(st.sampled_from(["memory", "time", "flops", "load"])),
        work=draw(numbers),
        static_memory=draw(numbers),
        activation_memory=draw(numbers),
        tensors=tuple(tensors),
        edges=np.array(edges).reshape(-1, 2),
        in_flight=flight,
        groups=tuple(groups),
        tied=tuple(draw(st.sampled_from(["together", "free"])) for _ in groups),
        group_bytes=tuple(draw(number) for _ in groups),
        memory_limit=limit,
        exactly=draw(st.booleans()),
    )


def plans(problem):
    """Lists every plan within the rules, limits aside, one row each."""
    S, n = problem.num_stages, problem.num_nodes
    table = np.array(list(itertools.product(range(S), repeat=n)), dtype=np.int64).reshape(-1, n)
    for before, after in problem.precedence.tolist():
        table = table[table[:, before] <= table[:, after]]
    for group, apart in zip(problem.groups, problem.apart, strict=True):
        nodes, first = table[:, list(group)], table[:, [min(group)]]
        table = table[(nodes >= first if apart else nodes == first).all(axis=1)]
    if problem.exactly:
        used = np.stack([(table == stage).any(axis=1) for stage in range(S)], axis=1)
        table = table[used.all(axis=1)]
    return table


def costs(problem, table):
    """Prices many plans at once: objective value, largest memory over its limit."""
    S = problem.num_stages
    values, over = [], []
    for stage in range(S):
        here = (table == stage).astype(float)
        work = here @ problem.work
        held = here @ problem.activation_memory
        static = here @ problem.static_memory
        comm = np.zeros(len(table))
        for tensor in problem.tensors:
            at = table[:, list(tensor.nodes)] == stage
            comm += tensor.comm * (at.any(axis=1) & ~at.all(axis=1))
            if tensor.producer is not None:
                held += tensor.receive_bytes * (
                    at.any(axis=1) & (table[:, tensor.producer] < stage)
                )
        for index in np.flatnonzero(problem.apart):
            stages = table[:, list(problem.groups[index])]
            at = stages == stage
            cut = at.any(axis=1) & ~at.all(axis=1)
            static += problem.group_bytes[index] * (cut & (stages.min(axis=1) < stage))
        memory = static + problem.flight[stage] * held
        values.append({"memory": memory, "load": work + comm}.get(problem.objective, work))
        over.append(memory / problem.limits[stage] if problem.limits is not None else 0 * memory)
    return np.max(values, axis=0), np.max(over, axis=0)


def optimum(problem):
    """Returns the best value over all plans within the limits, or None."""
    table = plans(problem)
    if not len(table):
        return None
    values, over = costs(problem, table)
    fits = over <= 1 + 1e-9
    return float(values[fits].min()) if fits.any() else None


@st.composite
def loads(draw):
    """Draws a problem of the load objective alone, with many tensors and nodes without work."""
    problem = draw(problems(max_nodes=8, max_stages=3, whole=True))
    n = problem.num_nodes
    work = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 3.0]), min_size=n, max_size=n))
    tensors = tuple(
        replace(tensor, comm=draw(st.sampled_from([0.5, 1.0, 2.0]))) for tensor in problem.tensors
    )
    return replace(
        problem,
        objective="load",
        work=work,
        tensors=tensors,
        groups=(),
        tied="together",
        group_bytes=(),
        memory_limit=None,
        exactly=False,
    )
