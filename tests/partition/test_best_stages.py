"""Stages that are found against all plans of small graphs, one by one."""

import itertools
import math
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.best_stages import StageMemory, state_sums, wires
from tarantella_pp.partition.graph import ideals, least_kept
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.planner import Planner
from tests.helpers.pictured import graphs


def sized(graph, tensors, weights, flops, integers, group):
    """These sizes; all keep what they read, those without FLOPs are cheap; a group has a state."""
    whole = {"dtype": "int32", "has_gradient": False}
    shared = min(group, default=0)
    return msgspec.structs.replace(
        graph,
        nodes=tuple(
            msgspec.structs.replace(
                node, keeps=node.inputs, flops=flops[node.id],
                weights=(shared,) if node.id in group else node.weights,
                operations=(least_kept.Operation(node.inputs, ((node.id + 1, 4.0 * size),), 0.0),)
                * (not flops[node.id]), needed=node.inputs * (not flops[node.id]),
            )
            for node, size in zip(graph.nodes, tensors[1:], strict=True)
        ),
        tensors=tuple(
            msgspec.structs.replace(
                tensor, bytes_per_sample=4 * size, **(whole if tensor.id in integers else {})
            )
            for tensor, size in zip(graph.tensors, tensors, strict=True)
        ),
        weights=tuple(
            msgspec.structs.replace(
                weight, shape=(size,), bytes=4 * size, stateful=bool(group) and weight.id == shared
            )
            for weight, size in zip(graph.weights, weights, strict=True)
        ),
    )  # fmt: skip


@st.composite
def problems(draw, balances=("memory", "flops")):
    """Small graphs with all sorts of sizes, and the options of a plan for them."""
    graph = draw(graphs(most=7))
    nodes, tensors = len(graph.nodes), len(graph.tensors)
    some, stages = st.sampled_from([0, 1, 3, 10, 40]), draw(st.integers(2, min(3, nodes)))
    options = PlanOptions(
        num_stages=stages,
        batch_size=8,
        num_micro_batches=draw(st.sampled_from([1, 4])),
        num_replicas=draw(st.sampled_from([1, 1, 2])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        balance=draw(st.sampled_from(balances)),
        recompute=draw(st.sampled_from(["none", "all", (0,), (1,)])),
        shard_optimizer=draw(st.booleans()),
        wire_dtype=draw(st.sampled_from([None, "bfloat16"])),
    ).settled()
    graph = sized(
        graph,
        draw(st.lists(some, min_size=tensors, max_size=tensors)),
        [1 + size for size in draw(st.lists(some, min_size=nodes, max_size=nodes))],
        draw(st.lists(some, min_size=nodes, max_size=nodes)),
        draw(st.sets(st.integers(0, tensors - 1), max_size=3)),
        draw(st.sets(st.integers(0, nodes - 1), max_size=2).filter(lambda one: len(one) != 1)),
    )
    planner = Planner("drawn", graph, "Adam", [2 * weight.bytes for weight in graph.weights])
    return planner, options, all_plans(planner.costs(options), options)


def all_plans(costs, options):
    graph, found = costs.graph, {}
    for one in itertools.product(range(options.num_stages), repeat=len(graph.nodes)):
        trained_first = all(one[nodes[0]] == min(one[n] for n in nodes) for nodes in graph.ties)
        if len({*one}) == options.num_stages and trained_first and graph.misplaced(one) is None:
            found[one] = largest(costs, options, one)
    return found


def largest(costs, options, assignment):
    if options.balance == "flops":
        return max(np.bincount(assignment, costs.flops()))
    return max(stage.memory_bytes for stage in costs.stages(assignment))


def cut(costs, assignment):
    return sum(
        size * (max(assignment[user] for user in users) - assignment[maker])
        for (maker, *users), size in wires(costs)
    )


@settings(max_examples=180, deadline=None)
@given(problems(), st.integers(0, 3))
def test_no_plan_needs_less(problem, turn):
    """And where ideals are too many some orders of the operations are taken."""
    planner, options, plans = problem
    if not plans:
        with pytest.raises(PlanError):
            planner.solve(options)
        return
    most = ideals.MOST_IDEALS if turn else 1
    with mock.patch.object(ideals, "MOST_IDEALS", most):
        found, best = planner.solve(options), min(plans.values())
    proof = found.certificate
    assert proof.value == plans[found.assignment]
    assert proof.lower_bound <= best * (1 + 1e-9)
    assert best <= proof.value
    if most == 1:
        return
    if options.num_stages == 2 or options.balance == "flops":  # messages come from one stage
        assert proof.optimal
    if options.balance == "flops":
        equal = [one for one, value in plans.items() if value <= best * (1 + 1e-10)]
        costs = planner.costs(options)
        fewest = min(cut(costs, one) for one in equal)
        assert cut(costs, found.assignment) == pytest.approx(fewest)


@given(problems(balances=("memory",)))
def test_a_stage_costs_no_less_than_is_known_of_its_parts(problem):
    planner, options, _ = problem
    costs, chain = planner.costs(options), planner.blocks.along([range(len(planner.blocks))])
    once, price, last = chain.sums(state_sums(costs)), StageMemory(costs).price, len(chain) - 1
    spans = itertools.combinations_with_replacement(range(last + 1), 4)
    for stage, (a, b, c, d) in itertools.product(range(options.num_stages), spans):
        inner = stage > 0, stage < options.num_stages - 1
        if b < c and (a > 0, d < last) == (b > 0, c < last) == inner:
            known = once[d] - once[a] + price(chain.sets[b], chain.sets[c], stage)[2]
            assert known <= price(chain.sets[a], chain.sets[d], stage)[1] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(problems(balances=("memory",)), st.floats(0.9, 1.1))
def test_a_limit_is_kept_where_any_plan_does(problem, share):
    planner, options, plans = problem
    if not plans:
        return
    best = min(plans.values())
    limit = math.ceil(share * best)
    limited = msgspec.structs.replace(options, balance="flops", memory_limit=limit)
    if limit < best:
        with pytest.raises(PlanError, match="memory limit"):
            planner.solve(limited)
    elif options.num_stages == 2:
        assert plans[planner.solve(limited).assignment] <= limit
