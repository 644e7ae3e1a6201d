"""What crosses the cuts, on graphs made by hand; no TensorFlow."""

import random

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries, stage_edges
from tests.helpers.plans import costs_of


def graph(edges, inputs=1, outputs=None, masks=(), without=()):
    """A graph whose node i makes tensor `inputs + i` of the tensors that `edges[i]` names."""
    count = inputs + len(edges)
    consumers = [tuple(n for n, reads in enumerate(edges) if t in reads) for t in range(count)]
    tensors = [
        Tensor(
            id=t,
            name=f"t{t}",
            shape=(None, 4),
            dtype="float32",
            producer=None if t < inputs else t - inputs,
            consumers=consumers[t],
            bytes_per_sample=16,
            has_gradient=t >= inputs and t not in without,
            mask_shape=(None, 4) if t in masks else None,
        )
        for t in range(count)
    ]
    nodes = [
        Node(id=n, name=f"n{n}", kind="Dense", inputs=tuple(reads), outputs=(inputs + n,))
        for n, reads in enumerate(edges)
    ]
    return LayerGraph(
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        inputs=tuple(range(inputs)),
        outputs=tuple(outputs or (count - 1,)),
    )


def test_what_is_sent_is_what_the_plan_counts():
    rng = random.Random(1)
    for _ in range(100):
        edges = [tuple(rng.sample(range(n + 1), min(2, n + 1))) for n in range(8)]
        made = graph(edges, masks=rng.sample(range(1, 9), 3), without=rng.sample(range(1, 9), 3))
        assignment = [0, *sorted(rng.choices(range(3), k=6)), 3]
        stages = {stage: i for i, stage in enumerate(sorted(set(assignment)))}
        assignment = [stages[stage] for stage in assignment]
        links = stage_edges(stage_boundaries(made, assignment, len(stages)))
        cuts = costs_of(made, 1).cuts(assignment)
        for link in links:
            between = [c for c in cuts if c.source == link.source and link.target in c.targets]
            values = [port for port in link.tensors if not port.mask]
            assert [made.tensors[port.tensor].name for port in values] == [
                c.tensor for c in between
            ]
            assert len(link.tensors) - len(values) == sum(c.mask_bytes > 0 for c in between)
            assert len(link.gradients) == sum(c.has_gradient for c in between)
        assert {(link.source, link.target) for link in links} == {
            (cut.source, target) for cut in cuts for target in cut.targets
        }
