from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.best_stages import best_solution
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.stage_costs import StageCostModel
from tests.helpers.pictured import graphs


def sized(graph, tensors, weights, integers=()):
    """A graph whose tensors and weights have these sizes, each operation keeping what it reads."""
    whole = {"dtype": "int32", "has_gradient": False}
    return msgspec.structs.replace(
        graph,
        nodes=tuple(msgspec.structs.replace(node, keeps=node.inputs) for node in graph.nodes),
        tensors=tuple(
            msgspec.structs.replace(
                tensor, bytes_per_sample=4 * size, **(whole if tensor.id in integers else {})
            )
            for tensor, size in zip(graph.tensors, tensors, strict=True)
        ),
        weights=tuple(
            msgspec.structs.replace(weight, shape=(size,), bytes=4 * size)
            for weight, size in zip(graph.weights, weights, strict=True)
        ),
    )


@st.composite
def problems(draw):
    """Small graphs with all sorts of sizes, and the options of a plan for them."""
    graph = draw(graphs(most=7))
    sizes = st.sampled_from([0, 1, 3, 10, 40])
    tensors, weights = (
        draw(st.lists(sizes, min_size=len(some), max_size=len(some)))
        for some in (graph.tensors, graph.weights)
    )
    stages = draw(st.integers(2, min(3, len(graph.nodes))))
    options = PlanOptions(
        num_stages=stages,
        batch_size=8,
        num_micro_batches=draw(st.sampled_from([1, 4])),
        num_replicas=draw(st.sampled_from([1, 1, 2])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        balance="memory",
        memory_limit=None,
        recompute=draw(st.sampled_from(["none", "all", (0,), (1,)])),
        shard_optimizer=draw(st.booleans()),
        wire_dtype=draw(st.sampled_from([None, "bfloat16"])),
    ).settled()
    integers = draw(st.sets(st.integers(0, len(graph.tensors) - 1), max_size=3))
    return sized(graph, tensors, [1 + weight for weight in weights], integers), options


def costs_of(graph, options):
    return StageCostModel(graph, [2 * weight.bytes for weight in graph.weights], options)


def all_assignments(graph, num_stages):
    for assignment in itertools.product(range(num_stages), repeat=len(graph.nodes)):
        if len(set(assignment)) == num_stages and all(
            assignment[a] <= assignment[b] for a, b in graph.edges
        ):
            yield assignment


def largest(costs, options, assignment):
    stages = costs.stages(assignment, options.in_flight, options.repeats)
    return max(stage.memory_bytes for stage in stages)


@settings(max_examples=60)
@given(problems())
def test_no_plan_needs_less(problem):
    graph, options = problem
    costs = costs_of(graph, options)
    found = best_solution(costs, options)
    best = min(largest(costs, options, a) for a in all_assignments(graph, options.num_stages))
    proof = found.certificate
    assert proof.value == largest(costs, options, found.assignment)
    assert proof.lower_bound <= best <= proof.value
    if options.num_stages == 2:  # messages come from one stage
        assert proof.optimal


@settings(max_examples=30)
@given(problems(), st.floats(0.9, 1.1))
def test_a_limit_is_kept_where_any_plan_does(problem, share):
    graph, options = problem
    costs = costs_of(graph, options)
    best = min(largest(costs, options, a) for a in all_assignments(graph, options.num_stages))
    limit = math.ceil(share * best)
    limited = msgspec.structs.replace(options, balance="flops", memory_limit=limit)
    if limit < best:
        with pytest.raises(Exception, match="memory limit"):
            best_solution(costs, limited)
    elif options.num_stages == 2:
        found = best_solution(costs, limited)
        assert largest(costs, limited, found.assignment) <= limit
