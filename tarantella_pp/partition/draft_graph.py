"""From the draft of a model to its layer graph: sizes, gradients and costs filled in."""

from __future__ import annotations

import math
import re
from typing import Any

from tarantella_pp.partition.draft import Call, Draft, Shape
from tarantella_pp.partition.graph import LayerGraph, Node, Tensor, Weight


def graph_of(
    draft: Draft,
    variables: tuple[Any, ...],
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    assumed_size: int,
) -> LayerGraph:
    """Makes the layer graph of a draft.

    Args:
        draft: Tensors and calls in running order.
        variables: All Keras variables of the calls, each once.
        inputs: Ids of the model's inputs.
        outputs: Ids of the model's outputs.
        assumed_size: Size to count unknown dimensions other than the batch with.

    Returns:
        The graph.
    """
    weights = tuple(_weight(i, variable) for i, variable in enumerate(variables))
    weight_ids = {id(variable): i for i, variable in enumerate(variables)}
    uses = [tuple(weight_ids[id(v)] for v in call.variables) for call in draft.calls]
    gradients = _gradients(draft, weights, uses)
    producers = {t: i for i, call in enumerate(draft.calls) for t in call.outputs}
    consumers: list[list[int]] = [[] for _ in draft.tensors]
    for i, call in enumerate(draft.calls):
        for t in call.inputs:
            consumers[t].append(i)
    tensors = tuple(
        Tensor(
            id=t,
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            producer=producers.get(t),
            consumers=tuple(consumers[t]),
            bytes_per_sample=item_bytes(tensor.dtype) * sample_size(tensor.shape, assumed_size),
            has_gradient=gradients[t],
            mask_shape=tensor.mask_shape,
        )
        for t, tensor in enumerate(draft.tensors)
    )
    unknown = any(sample_size(t.shape, 1) != sample_size(t.shape, 2) for t in draft.tensors)
    return LayerGraph(
        nodes=tuple(
            _node(i, call, tuple(weights[w] for w in uses[i])) for i, call in enumerate(draft.calls)
        ),
        tensors=tensors,
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        assumed_size=assumed_size if unknown else None,
    )


def sample_size(shape: Shape, assumed_size: int) -> int:
    """Returns the number of elements of one sample.

    Args:
        shape: Shape of the tensor; its first unknown dimension is the batch.
        assumed_size: Size to count the other unknown dimensions with.
    """
    sizes = list(shape)
    if None in sizes:
        sizes.remove(None)
    elif sizes:
        sizes.pop(0)
    return math.prod(assumed_size if size is None else size for size in sizes)


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a dtype, given by name, e.g. `"bfloat16"`."""
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(1, int(digits.group()) // 8)


def _node(i: int, call: Call, weights: tuple[Weight, ...]) -> Node:
    return Node(
        id=i,
        name=call.name,
        kind=type(call.operation).__name__,
        inputs=call.inputs,
        outputs=call.outputs,
        weights=tuple(weight.id for weight in weights),
        parameters=sum(weight.bytes for weight in weights if weight.trainable),
        constants=sum(weight.bytes for weight in weights if not weight.trainable),
    )


def _weight(i: int, variable: Any) -> Weight:
    shape = tuple(int(size) for size in variable.shape)
    return Weight(
        id=i,
        name=variable.path,
        shape=shape,
        dtype=variable.dtype,
        trainable=bool(variable.trainable),
        bytes=math.prod(shape) * item_bytes(variable.dtype),
    )


def _gradients(
    draft: Draft, weights: tuple[Weight, ...], uses: list[tuple[int, ...]]
) -> list[bool]:
    """Returns for each tensor whether the backward pass sends a gradient over it."""
    flows = [False] * len(draft.tensors)
    for call, used in zip(draft.calls, uses, strict=True):
        upstream = any(weights[w].trainable for w in used) or any(flows[t] for t in call.inputs)
        if upstream and type(call.operation).__name__ != "StopGradient":
            for t in call.outputs:
                flows[t] = "float" in draft.tensors[t].dtype
    return flows
