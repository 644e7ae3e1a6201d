"""Linear orders worth cutting: topological orders of several tempers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray, IntArray


def ranked_order(instance: Instance, key: Sequence[float] | FloatArray) -> IntArray:
    """Orders nodes topologically, the ready one with the smallest key first."""
    keys = [float(value) for value in key]
    waiting = [len(before) for before in instance.preds]
    ready = [(keys[node], node) for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for after in instance.succs[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (keys[after], after))
    return np.array(order, dtype=np.int64)


def depth_first_order(instance: Instance, *, backward: bool = False) -> IntArray:
    """Orders nodes by finishing one branch before the next begins."""
    preds = instance.succs if backward else instance.preds
    succs = instance.preds if backward else instance.succs
    waiting = [len(before) for before in preds]
    stack = [node for node, count in enumerate(waiting) if count == 0][::-1]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        for after in reversed(succs[node]):
            waiting[after] -= 1
            if waiting[after] == 0:
                stack.append(after)
    return np.array(order[::-1] if backward else order, dtype=np.int64)


def starting_orders(instance: Instance) -> list[IntArray]:
    """Returns a few orders to start from, each once: a chain has one."""
    weight = instance.objective.fixed + instance.objective.factor.mean() * instance.objective.held
    depth = np.zeros(instance.num_nodes)
    for node, before in enumerate(instance.preds):
        depth[node] = max((depth[b] + 1 for b in before), default=0.0)
    orders = [
        np.arange(instance.num_nodes),
        depth_first_order(instance),
        depth_first_order(instance, backward=True),
        ranked_order(instance, depth),
        ranked_order(instance, -weight),
        ranked_order(instance, weight),
    ]
    return list({order.tobytes(): order for order in orders}.values())


def random_order(
    instance: Instance, random: np.random.Generator, stages: IntArray | None = None
) -> IntArray:
    """Draws an order, one that keeps the stages of a plan whole where one is given."""
    key = random.random(instance.num_nodes)
    return ranked_order(instance, key if stages is None else key + stages)
