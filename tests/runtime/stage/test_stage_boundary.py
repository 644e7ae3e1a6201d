"""What crosses the cuts, on graphs made by hand; no TensorFlow."""

import random

import msgspec

from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries, stage_edges
from tests.helpers.pictured import graph_of
from tests.helpers.plans import costs_of


def test_what_is_sent_is_what_the_plan_counts():
    rng = random.Random(1)
    for _ in range(100):
        reads = [set(rng.sample(range(-1, n), min(2, n + 1))) for n in range(8)]
        made = graph_of([f"n{n}" for n in range(8)], reads)
        masked, alone = rng.sample(range(1, 9), 3), rng.sample(range(1, 9), 3)
        tensors = [
            msgspec.structs.replace(
                tensor,
                has_gradient=tensor.has_gradient and tensor.id not in alone,
                mask_shape=(None, 4) if tensor.id in masked else None,
            )
            for tensor in made.tensors
        ]
        made = msgspec.structs.replace(made, tensors=tuple(tensors))
        assignment = [0, *sorted(rng.choices(range(3), k=6)), 3]
        stages = {stage: i for i, stage in enumerate(sorted(set(assignment)))}
        assignment = [stages[stage] for stage in assignment]
        links = stage_edges(stage_boundaries(made, assignment, len(stages)))
        cuts = costs_of(made, 1).cuts(assignment)
        for link in links:
            between = [c for c in cuts if c.source == link.source and link.target in c.targets]
            values = [port for port in link.tensors if not port.mask]
            names = [made.tensors[port.tensor].name for port in values]
            assert names == [cut.tensor for cut in between]
            assert len(link.tensors) - len(values) == sum(c.mask_bytes > 0 for c in between)
            assert len(link.gradients) == sum(c.has_gradient for c in between)
        assert {(link.source, link.target) for link in links} == {
            (cut.source, target) for cut in cuts for target in cut.targets
        }
