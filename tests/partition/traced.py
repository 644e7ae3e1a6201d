"""What a gradient graph of TensorFlow really keeps of the forward pass: the truth for rules."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tarantella_pp.partition.keras_internals import operation_fn, tree

VIEWS = {"Reshape", "Identity", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
FREE = {"ReadVariableOp", "Const", "Placeholder", "Shape", "Size", "Rank", "VarHandleOp"}


def storage(tensor):
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def kept_bytes(extracted, rows=1):
    """Bytes that the backward pass of a whole extracted model needs again, by tracing it."""
    found = {}

    def forward_and_backward(*inputs):
        values = dict(zip(extracted.graph.inputs, inputs, strict=True))
        for call in extracted.calls:
            args, kwargs = call.arguments.fill_in({k: values[t] for k, t in call.bindings.items()})
            result = operation_fn(call.operation, training=True)(*args, **kwargs)
            values.update(zip(call.outputs, tree.flatten(result), strict=True))
        outputs = [values[t] for t in extracted.graph.outputs]
        seeds = [tf.compat.v1.placeholder(o.dtype, o.shape) for o in outputs]
        weights = [v.value for v in extracted.variables if v.trainable]
        watched = [x for x in inputs if x.dtype.is_floating]
        gradients = tf.gradients(outputs, weights + watched, grad_ys=seeds)
        gradients = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        found.update(inputs=inputs, seeds=seeds, gradients=gradients)
        return outputs

    tensors = [extracted.graph.tensors[t] for t in extracted.graph.inputs]
    specs = [tf.TensorSpec((rows, *t.shape[1:]), t.dtype) for t in tensors]
    traced = tf.function(forward_and_backward, input_signature=specs, autograph=False)
    operations = traced.get_concrete_function().graph.get_operations()
    backward = {seed.op for seed in found["seeds"]}
    for op in operations:
        if any(t.op in backward for t in op.inputs):
            backward.add(op)
    fixed = set()
    fed = {x.op for x in found["inputs"]}
    for op in operations:
        repeats = op.inputs and all(t.op in fixed for t in op.inputs)
        if op not in fed and (op.type in FREE or (repeats and "Random" not in op.type)):
            fixed.add(op)
    needed, todo = set(), [gradient.op for gradient in found["gradients"]]
    while todo:
        op = todo.pop()
        if op not in needed:
            needed.add(op)
            todo += [tensor.op for tensor in op.inputs]
    kept = {}
    for op in operations:
        for tensor in op.inputs if op in backward and op in needed else ():
            root = storage(tensor)
            if tensor.op not in backward and root.op not in fixed and root.dtype != tf.resource:
                kept[root.ref()] = root.dtype.size * int(np.prod(root.shape))
    return sum(kept.values())
