"""Graphs to plan, made here: an operator graph of a GPT, residual, branching and random ones."""

from __future__ import annotations

import json
import random
from typing import Any

from tarantella_pp.partition.external.external_graph import ExternalGraph, loads_graph


class Builder:
    """Collects the nodes and tensors of an external graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[dict[str, Any]] = []
        self.inputs: list[list[int]] = []
        self.sizes: list[float] = []

    def add(self, name: str, time: float, memory: float, size: float, *inputs: int) -> int:
        """Adds a node: name, time (ms), memory (bytes), bytes of its output, its inputs."""
        index = len(self.nodes)
        self.nodes.append({"id": index, "name": name, "time": time, "memory": memory})
        self.inputs.append(sorted(set(inputs)))
        self.sizes.append(size)
        return index

    def graph(self, bandwidth: float = 1e7) -> ExternalGraph:
        """Returns the external graph; `bandwidth` is in bytes per millisecond."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for node, inputs in enumerate(self.inputs):
            for source in inputs:
                users[source].append(node)
        tensors, edges = [], []
        for source, using in enumerate(users):
            if using:
                cost = {"comm": self.sizes[source] / bandwidth, "bytes": self.sizes[source]}
                index = len(tensors)
                tensors.append({"id": index, "src": source, "nodes": [source, *using], **cost})
                edges += [{"src": source, "dst": u, **cost, "tensor": index} for u in using]
        graph = {"name": self.name, "nodes": self.nodes, "edges": edges, "tensors": tensors}
        return loads_graph(json.dumps(graph))


def gpt(nodes: int, width: int = 1024, tokens: int = 1024, seed: int = 0) -> ExternalGraph:
    """An operator graph of a GPT: about 25 operators in each block.

    Args:
        nodes: Rough number of nodes wanted.
        width: Model width.
        tokens: Tokens of a micro-batch.
        seed: Seed of the small differences between blocks.
    """
    draw = random.Random(seed)
    builder = Builder(f"gpt-{nodes}")
    act = 2.0 * width * tokens
    weight = 2.0 * width * width

    def op(name: str, flops: float, parameters: float, size: float, *inputs: int) -> int:
        time = (flops / 5e10 + size / 2e9) * draw.uniform(0.95, 1.05)
        return builder.add(name, time, parameters + size, size, *inputs)

    matmul = 2.0 * width * width * tokens
    x = op("embedding", 0.0, 50 * weight, act)
    for block in range(max(1, round((nodes - 3) / 25))):
        name = f"block{block}"
        h = op(f"{name}/norm1", 0.0, 0.0, act, x)
        heads = []
        for part in "qkv":
            y = op(f"{name}/{part}", matmul, weight, act, h)
            y = op(f"{name}/{part}_bias", 0.0, 2.0 * width, act, y)
            y = op(f"{name}/{part}_split", 0.0, 0.0, act, y)
            heads.append(op(f"{name}/{part}_transpose", 0.0, 0.0, act, y))
        scores = op(f"{name}/scores", matmul, 0.0, 2 * act, heads[0], heads[1])
        scores = op(f"{name}/softmax", 0.0, 0.0, 2 * act, scores)
        y = op(f"{name}/context", matmul, 0.0, act, scores, heads[2])
        y = op(f"{name}/merge", 0.0, 0.0, act, y)
        y = op(f"{name}/project", matmul, weight, act, y)
        y = op(f"{name}/dropout", 0.0, 0.0, act, y)
        x = op(f"{name}/add1", 0.0, 0.0, act, x, y)
        y = op(f"{name}/norm2", 0.0, 0.0, act, x)
        y = op(f"{name}/up", 4 * matmul, 4 * weight, 4 * act, y)
        y = op(f"{name}/gelu", 0.0, 0.0, 4 * act, y)
        y = op(f"{name}/down", 4 * matmul, 4 * weight, act, y)
        x = op(f"{name}/add2", 0.0, 0.0, act, x, y)
    x = op("norm", 0.0, 0.0, act, x)
    op("head", 50 * matmul, 0.0, 50 * act, x)
    return builder.graph()


def residual(blocks: int = 16, seed: int = 1) -> ExternalGraph:
    """A residual net: blocks of three convolutions with a shortcut, narrower as they go on."""
    draw = random.Random(seed)
    builder = Builder(f"residual-{blocks}")
    x = builder.add("stem", 4.0, 5e7, 4e7)
    for block in range(blocks):
        size = 4e7 / 2 ** (block * 4 // blocks)
        y = x
        for step in range(3):
            y = builder.add(
                f"conv{block}_{step}", draw.uniform(1, 4), draw.uniform(1, 9) * 1e6, size, y
            )
            y = builder.add(f"norm{block}_{step}", draw.uniform(0.1, 0.4), size, size, y)
        x = builder.add(f"add{block}", 0.1, size, size, x, y)
    builder.add("head", 1.0, 8e6, 4e3, x)
    return builder.graph()


def branching(blocks: int = 9, seed: int = 2) -> ExternalGraph:
    """An inception-like net: blocks of four branches of one to four convolutions."""
    draw = random.Random(seed)
    builder = Builder(f"branching-{blocks}")
    x = builder.add("stem", 8.0, 9e7, 3e7)
    for block in range(blocks):
        size = 3e7 / 2 ** (block * 3 // blocks)
        ends = []
        for branch, length in enumerate((1, 2, 3, 4)):
            y = x
            for step in range(length):
                name = f"conv{block}_{branch}_{step}"
                y = builder.add(name, draw.uniform(0.5, 3), draw.uniform(1, 5) * 1e6, size / 4, y)
            ends.append(y)
        x = builder.add(f"concat{block}", 0.2, size, size, *ends)
    builder.add("head", 1.0, 8e6, 4e3, x)
    return builder.graph()


def layered(layers: int = 20, width: int = 4, seed: int = 3) -> ExternalGraph:
    """Random layers: each node reads one to three nodes of the two layers before."""
    draw = random.Random(seed)
    builder = Builder(f"layered-{layers}x{width}")
    rows: list[list[int]] = []
    for layer in range(layers):
        near = [node for row in rows[-2:] for node in row]
        row = []
        for place in range(width):
            inputs = draw.sample(near, min(len(near), draw.randint(1, 3)))
            size = draw.uniform(1e5, 5e6)
            time, memory = draw.uniform(0.1, 5), draw.uniform(1e6, 5e7)
            row.append(builder.add(f"node{layer}_{place}", time, memory, size, *inputs))
        rows.append(row)
    return builder.graph()
