"""From a Keras model to a plan: reads the graph, counts the costs, solves and writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.cost import Costs
from tarantella_pp.partition.extraction import extract
from tarantella_pp.partition.formulation import best_solution
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan import Plan, Proof
from tarantella_pp.partition.slots import optimizer_name, slot_bytes


def make_plan(
    model: keras.Model,
    num_stages: int,
    *,
    batch_size: int = 32,
    num_micro_batches: int | None = None,
    num_replicas: int = 1,
    schedule: str = "1f1b",
    balance: str = "memory",
    memory_limit: int | float | str | None = None,
    optimizer: Any = None,
    in_flight: Sequence[int] | None = None,
) -> Plan:
    """Plans the stages of a model's pipeline; needs neither MPI nor data, and runs nothing.

    The plan is the best over all orders in which the operations can run, or comes with a bound
    on how much better one could be. Operations that share variables stay on one stage.

    Args:
        model: A Functional or built Sequential model.
        num_stages: Number of pipeline stages; each gets at least one operation.
        batch_size: Samples of a step, over all replicas.
        num_micro_batches: Micro-batches of a step. Default: the smallest number that keeps the
            bubble (p - 1) / (m + p - 1) of p stages at or below 20 %, which is 4 (p - 1), but not
            more than there are samples; 1 for one stage.
        num_replicas: Number of pipelines side by side, among which a batch is split.
        schedule: `"gpipe"`, `"1f1b"` or `"zb-h1"`; another one together with `in_flight`.
        balance: `"memory"` for the smallest largest memory of a stage, buffers of messages left
            out; `"flops"` for the smallest largest number of operations.
        memory_limit: Largest memory of a stage, in bytes or as in `"16GB"`. Default: none.
        optimizer: The optimizer whose slots count as memory: a Keras optimizer or its name.
            Default: two slots for each variable, as Adam has.
        in_flight: Most micro-batches that the schedule holds on each stage at a time. Default:
            what the schedule's formula says.

    Returns:
        The plan.

    Raises:
        ConfigurationError: An option cannot work, alone or with this model.
        UnsupportedModelError: The model cannot be cut into stages.
        PlanError: No plan keeps the limit, or has an operation for each stage.
    """
    options = PlanOptions.checked(
        num_stages=num_stages,
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        schedule=schedule,
        balance=balance,
        memory_limit=memory_limit,
        in_flight=in_flight,
    )
    graph = extract(model).graph
    if num_stages > len(graph.nodes):
        raise ConfigurationError(
            f"Model '{model.name}' has {len(graph.nodes)} operations, so it can have at most "
            f"{len(graph.nodes)} stages. Received: num_stages={num_stages}"
        )
    costs = Costs(graph, slot_bytes(optimizer, graph.weights), options.rows)
    solution = best_solution(costs, options)
    estimated = [n for n in graph.nodes if "estimated" in (n.flops_source, n.residual_source)]
    return Plan(
        model=model.name,
        num_stages=num_stages,
        num_micro_batches=options.num_micro_batches,
        num_replicas=num_replicas,
        batch_size=batch_size,
        schedule=schedule,
        balance=balance,
        optimizer=optimizer_name(optimizer),
        memory_limit=options.memory_limit,
        fingerprint=graph.fingerprint(),
        node_names=tuple(node.name for node in graph.nodes),
        assignment=solution.assignment,
        stages=costs.stages(solution.assignment, options.in_flight),
        cuts=costs.cuts(solution.assignment),
        certificate=Proof.of(solution.certificate),
        bubble=options.bubble,
        assumed_size=graph.assumed_size,
        estimated=tuple(dict.fromkeys(node.kind for node in estimated)),
    )
