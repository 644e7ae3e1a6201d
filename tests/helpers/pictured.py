"""Layer graphs and plans to draw, made without Keras."""

import msgspec
from hypothesis import strategies as st

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.schedule import ScheduleSpec
from tests.helpers import plans

KINDS = ("Conv2D", "BatchNormalization", "ReLU", "Conv2D", "Add")


def residual_graph(layers, *, long_skips=0):
    """Blocks of five with a skip each, and some skips from the first to the last blocks."""
    names = [f"block{i // 5}_{i % 5}_{KINDS[i % 5].lower()}" for i in range(layers)]
    reads = []
    for i in range(layers):
        own = {i - 1}
        if i % 5 == 4:
            own.add(i - 5)
        if layers - 1 - long_skips * 5 <= i < layers - 1 and i % 5 == 1:
            own.add(layers - 1 - i)
        reads.append(own)
    return graph_of(names, reads)


def graph_of(names, reads):
    """A graph of operations that each read the results of others; -1 is the model's input."""
    layers = len(names)
    weights = tuple(
        Weight(i, f"{name}/kernel", (64, 4 * (1 + i % 7)), "float32", True, 1024 * (1 + i % 7))
        for i, name in enumerate(names)
    )
    nodes = tuple(
        Node(
            i, name, KINDS[i % 5], inputs=tuple(sorted(j + 1 for j in reads[i])),  # 0 is the input
            outputs=(i + 1,), weights=(i,), parameters=weights[i].bytes, flops=1e6 * (1 + i % 4),
            keeps=(i + 1,),
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    readers = {j: tuple(i for i in range(layers) if j in reads[i]) for j in range(-1, layers)}
    tensors = [Tensor(0, "image", (None, 64), "float32", None, readers[-1], 256)]
    for i, name in enumerate(names):
        tensors.append(Tensor(i + 1, name, (None, 64), "float32", i, readers[i], 4096, True))
    return LayerGraph(nodes, tuple(tensors), (0,), (layers,), weights)


@st.composite
def graphs(draw, names=None, most=40):
    """Graphs in which each operation reads some of those before it."""
    layers = draw(st.integers(2, most))
    reads = [draw(st.sets(st.integers(-1, i - 1), min_size=1, max_size=3)) for i in range(layers)]
    if names is None:
        return graph_of([f"layer_{i}" for i in range(layers)], reads)
    return graph_of(draw(st.lists(names, min_size=layers, max_size=layers, unique=True)), reads)


def plan_of(graph, num_stages, *, schedule="1f1b", micro_batches=8, **changes):
    total = len(graph.nodes)
    return plans.plan_of(
        graph,
        [i * num_stages // total for i in range(total)],
        ScheduleSpec.of(schedule, num_stages).make(micro_batches).held,
        num_micro_batches=micro_batches,
        batch_size=64,
        schedule=schedule,
        **{"model": "net", **changes},
    )


def small(**changes):
    plan = plan_of(residual_graph(20, long_skips=1), 4, memory_limit=2**20)
    return msgspec.structs.replace(plan, **changes)
