"""A small plan made by hand, without Keras."""

import msgspec

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Certificate, PlanConfig
from tarantella_pp.partition.plan.stage_costs import StageCostModel


def chain_graph(length=4, width=8):
    """A chain of dense layers with names as Keras makes them."""
    names = ["dense" if i == 0 else f"dense_{i}" for i in range(length)]
    row, shape = width * 4, (None, width)
    weights = [
        Weight(i, f"{name}/kernel", (width, width), "float32", True, width * row)
        for i, name in enumerate(names)
    ]
    nodes = [
        Node(
            i, name, "Dense", (i,), (i + 1,), (i,), parameters=width * row, keeps=(i,),
            flops=2.0 * width * width, flops_source="analytic", residual_source="analytic",
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    readers = [*((i,) for i in range(length)), ()]
    tensors = [Tensor(0, "x", shape, "float32", None, readers[0], row)]
    for i, name in enumerate(names):
        tensors.append(Tensor(i + 1, name, shape, "float32", i, readers[i + 1], row, True))
    return LayerGraph(tuple(nodes), tuple(tensors), (0,), (length,), tuple(weights))


def costs_of(graph, rows, held=(1,), *, micro_batches=1, replicas=1, slots=None, **changes):
    """The costs of a graph for micro-batches of some rows, with two optimizer slots."""
    config = {"num_stages": 1, "schedule": "1f1b", "balance": "memory", "memory_limit": None}
    config |= {"num_micro_batches": micro_batches, "num_replicas": replicas}
    config |= {"batch_size": rows * micro_batches * replicas, **changes}
    if slots is None:
        slots = [2 * weight.bytes * weight.trainable for weight in graph.weights]
    return StageCostModel(graph, slots, PlanConfig(**config), in_flight=held)


def plan_of(graph, assignment, held=None, **changes):
    """The plan of an assignment, with two optimizer slots and 4 micro-batches of 8 samples."""
    num_stages = max(assignment) + 1
    held = held or [num_stages - stage for stage in range(num_stages)]
    costs = costs_of(graph, 8, held)
    plan = Plan(
        model="chain", num_stages=num_stages, num_micro_batches=4, num_replicas=1, batch_size=32,
        schedule="1f1b", balance="memory", optimizer="Adam", memory_limit=None,
        fingerprint=graph.fingerprint(),
        node_names=tuple(node.name for node in graph.nodes),
        assignment=tuple(assignment),
        stages=costs.stages(assignment),
        cuts=costs.cuts(assignment),
        certificate=Certificate(3072.0, 3072.0, 0.0, True, "chain DP, 5 ideals", 0.001),
        bubble=0.2,
    )  # fmt: skip
    return msgspec.structs.replace(plan, **changes)
