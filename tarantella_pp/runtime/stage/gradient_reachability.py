"""Which weights the gradient of the loss reaches at all.

Keras leaves a weight alone that no gradient reaches, where a gradient of zero would let it decay.
A stage by itself cannot tell the two apart: what comes back over a cut may be zeros only because
a later stage, or the loss, does not use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary
from tarantella_pp.runtime.stage.stage import Stage


def find_connected_gradients(
    boundaries: Sequence[StageBoundary],
    stages: Mapping[int, Stage],
    placement: Sequence[int],
    communicator: Communicator,
    scored: Iterable[int],
) -> None:
    """Tells each stage's gradient sums which weights no gradient reaches; once for each loss."""
    connected = {
        (-1, tensor) for tensor in communicator.broadcast_json(list(scored), placement[-1])
    }
    for boundary in reversed(boundaries):
        coming = [
            (boundary.model_outputs != () and (-1, tensor.tensor) in connected)
            or any((edge.target, tensor.tensor) in connected for edge in boundary.sends)
            for tensor in boundary.outputs_with_gradient
        ]
        stage = stages.get(boundary.index)
        reached = None if stage is None else stage.reached(coming)
        reached = communicator.broadcast_json(reached, placement[boundary.index])
        connected |= {
            (boundary.index, tensor.tensor)
            for tensor, is_reached in zip(boundary.input_gradients, reached, strict=True)
            if is_reached
        }
