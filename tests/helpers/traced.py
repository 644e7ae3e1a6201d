"""What the runtime really keeps of a forward pass: the truth for rules."""

from __future__ import annotations

import tensorflow as tf

from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries


def activation_bytes_total(extracted, rows=1):
    """Bytes that a stage with a whole extracted model keeps of a micro-batch."""
    graph = extracted.graph
    (layout,) = stage_boundaries(graph, [0] * len(graph.nodes), 1)
    stage = Stage(layout, extracted.calls)
    tensors = [graph.tensors[port.tensor] for port in layout.inputs]
    stage.forward(0, [tf.ones((rows, *t.shape[1:]), t.dtype) for t in tensors])
    return stage.residual_bytes
