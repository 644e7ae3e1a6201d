"""Runs the calls of an extracted model stage by stage, the way ranks will."""

import random

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import get_mask, operation_fn, set_mask, tree


def random_stages(graph, num_stages, seed):
    """A random order-respecting assignment: no edge runs from a later to an earlier stage."""
    rng = random.Random(seed)
    stages = [0] * len(graph.nodes)
    weights = [rng.random() for _ in graph.nodes]
    for node in graph.nodes:
        least = max((stages[a] for a, b in graph.edges if b == node.id), default=0)
        step = 0 if weights[node.id] < 0.6 else rng.randrange(num_stages)
        stages[node.id] = min(num_stages - 1, least + step)
    return stages


def moved(value):
    """A copy of a tensor, as a message between ranks makes it; it has no mask."""
    return tf.constant(np.array(value)) if value.dtype != tf.bfloat16 else value + 0


def run(extracted, data, stages, training):
    """Runs all stages; returns the outputs in the model's structure, all values and masks."""
    graph = extracted.graph
    dtypes = [graph.tensors[t].dtype for t in graph.inputs]
    flat = [tf.convert_to_tensor(x, d) for x, d in zip(tree.flatten(data), dtypes, strict=True)]
    everything = dict(zip(graph.inputs, flat, strict=True))
    masks = dict.fromkeys(graph.inputs)
    for stage in sorted(set(stages)):
        nodes = [node for node in graph.nodes if stages[node.id] == stage]
        made = {t for node in nodes for t in node.outputs}
        values = {t: moved(everything[t]) for node in nodes for t in node.inputs if t not in made}
        for node in nodes:
            call = extracted.calls[node.id]
            for t in call.inputs:
                set_mask(values[t], None if t in call.unmasked else masks[t])
            args, kwargs = call.arguments.fill_in({k: values[t] for k, t in call.bindings.items()})
            result = operation_fn(call.operation, training=training)(*args, **kwargs)
            values.update(zip(call.outputs, tree.flatten(result), strict=True))
            masks.update((t, get_mask(values[t])) for t in call.outputs)
        everything.update((t, values[t]) for t in made)
    outputs = [everything[t] for t in graph.outputs]
    return tree.pack_sequence_as(extracted.outputs_struct, outputs), everything, masks
