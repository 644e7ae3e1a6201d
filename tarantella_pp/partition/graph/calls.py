"""A layer graph while it is being read: tensors and calls as they are found, then their costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import keras
import msgspec

from tarantella_pp.internals.functional import trained_variables
from tarantella_pp.partition.graph.flops import (
    SizedTensor,
    forward_flops,
    function_flops,
    sized_call,
)
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.partition.graph.placeholders import Probe, rows_per_sample, sample_axis
from tarantella_pp.partition.graph.saved_activations import saved_activations
from tarantella_pp.partition.graph.units import Shape, item_bytes, sample_shape


@dataclass(frozen=True, slots=True)
class Call:
    """How to run one node of the graph.

    With `values` holding a tensor per tensor id, and `masks` the mask each was made with, the node
    runs, once the mask of each input `t` is set to `None if t in call.unmasked else masks[t]`, as
    `args, kwargs = call.arguments.fill_in({k: values[t] for k, t in call.bindings.items()})`,
    `result = operation_fn(call.operation, training=training)(*args, **kwargs)`, and
    `keras.tree.flatten(result)` are the values of `call.outputs`. `training` must be a bool:
    the one in the arguments is from the day when the model was built.
    """

    name: str  # unique name of the node
    operation: Any  # the layer or other Keras operation to call; the user's own object
    arguments: Any  # the symbolic arguments it was called with (`Node.arguments` of Keras)
    # From `id` of each symbolic tensor in `arguments` to the id of a graph's tensor
    bindings: dict[int, int]
    outputs: tuple[int, ...]  # ids of the tensors it makes, in the order of the flattened result
    variables: tuple[Any, ...]  # the Keras variables it uses, seeds of random layers included
    # Ids of the inputs that it must see without the mask they were made with: an earlier call has
    # deleted it, in place
    unmasked: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the tensors it reads, each once, in the order of its arguments."""
        return tuple(dict.fromkeys(self.bindings.values()))


class GraphBuilder:
    """Collects the tensors and calls of a model in the order in which Keras runs them."""

    def __init__(self) -> None:
        # An id is a position. What follows from all calls together, such as who reads a tensor, is
        # filled in by `graph_of`.
        self.tensors: list[Tensor] = []
        # The shapes of each for two numbers of samples; `None` where they cannot be told
        self.probes: list[Probe] = []
        self.calls: list[Call] = []
        self.unmasked: set[int] = set()  # ids of the tensors whose masks a call has deleted
        self._names: Counter[str] = Counter()

    def add_tensor(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        mask_shape: Shape | None = None,
        *,
        probe: Probe,
    ) -> int:
        """Adds a tensor and returns its id."""
        tensor = Tensor(
            id=len(self.tensors),
            name=name,
            shape=shape,
            dtype=dtype,
            mask_shape=mask_shape,
            rows_per_sample=rows_per_sample(probe),
            sample_axis=sample_axis(probe),
        )
        self.tensors.append(tensor)
        self.probes.append(probe)
        return tensor.id

    def unique_name(self, path: str) -> str:
        """Returns the path itself the first time, then `"path:1"`, `"path:2"` and so on."""
        name = path
        while self._names[name]:
            name = f"{path}:{self._names[path]}"
            self._names[path] += 1
        self._names[name] += 1
        return name

    def pruned(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[GraphBuilder, list[int]]:
        """Leaves out operations whose results nobody reads, and numbers the tensors anew.

        Opening a nested model leaves such operations behind: those that computed a mask which
        the opened layers now find on the tensor itself. A layer is never left out; it may have
        losses or statistics.
        """
        needed = set(inputs) | set(outputs)
        calls = []
        for call in reversed(self.calls):
            if isinstance(call.operation, keras.layers.Layer) or needed & set(call.outputs):
                needed.update(call.inputs, call.outputs)
                calls.append(call)
        numbers = [-1] * len(self.tensors)
        result = GraphBuilder()
        for old in sorted(needed):
            numbers[old] = len(result.tensors)
            result.tensors.append(msgspec.structs.replace(self.tensors[old], id=numbers[old]))
            result.probes.append(self.probes[old])
        for call in reversed(calls):
            result.calls.append(
                replace(
                    call,
                    bindings={key: numbers[t] for key, t in call.bindings.items()},
                    outputs=tuple(numbers[t] for t in call.outputs),
                    unmasked=frozenset(numbers[t] for t in call.unmasked),
                )
            )
        return result, numbers


#: Operations whose result is a view of what they are given.
_ALIASES = {
    *("Reshape", "Flatten", "Squeeze", "ExpandDims", "Ravel", "Identity", "StopGradient"),
    "ActivityRegularization",
}


def graph_of(
    draft: GraphBuilder,
    variables: tuple[Any, ...],
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    assumed_size: int,
) -> LayerGraph:
    """Makes the layer graph of a draft."""
    trained = {id(v) for call in draft.calls for v in trained_variables(call.operation)}
    weights = tuple(_weight(i, v, id(v) not in trained) for i, v in enumerate(variables))
    weight_ids = {id(variable): i for i, variable in enumerate(variables)}
    uses = [tuple(weight_ids[id(v)] for v in call.variables) for call in draft.calls]
    gradients = _gradients(draft, weights, uses)
    sized = [
        SizedTensor(t, sample_shape(tensor.shape, assumed_size), item_bytes(tensor.dtype), flows)
        for t, (tensor, flows) in enumerate(zip(draft.tensors, gradients, strict=True))
    ]
    # Tables of positions have no row for a sample; they count as one, never as nothing.
    rows = [max(1, tensor.rows_per_sample or 1) for tensor in draft.tensors]
    nodes = tuple(
        _node(i, call, sized, tuple(weights[w] for w in used), rows)
        for i, (call, used) in enumerate(zip(draft.calls, uses, strict=True))
    )
    unknown = any(sample_shape(t.shape, 1) != sample_shape(t.shape, 2) for t in draft.tensors)
    return LayerGraph(
        nodes=nodes,
        tensors=_tensors(draft, nodes, sized, rows),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        assumed_size=assumed_size if unknown else None,
    )


def _tensors(
    draft: GraphBuilder, nodes: tuple[Node, ...], sized: list[SizedTensor], rows: list[int]
) -> tuple[Tensor, ...]:
    producers = {t: node.id for node in nodes for t in node.outputs}
    consumers: list[list[int]] = [[] for _ in draft.tensors]
    aliases: dict[int, int] = {}
    for node in nodes:
        for t in node.inputs:
            consumers[t].append(node.id)
        if node.kind in _ALIASES and len(node.inputs) == len(node.outputs) == 1:
            aliases[node.outputs[0]] = node.inputs[0]
    return tuple(
        msgspec.structs.replace(
            tensor,
            producer=producers.get(t),
            consumers=tuple(consumers[t]),
            bytes_per_sample=sized[t].bytes * rows[t],
            has_gradient=sized[t].has_gradient,
            alias_of=aliases.get(t),
        )
        for t, tensor in enumerate(draft.tensors)
    )


def _node(
    i: int, call: Call, sized: list[SizedTensor], weights: tuple[Weight, ...], rows: list[int]
) -> Node:
    described = sized_call(
        call.operation,
        call.arguments,
        {key: sized[t] for key, t in call.bindings.items()},
        tuple(sized[t] for t in call.outputs),
        tuple(weight.shape for weight in weights if weight.trainable),
    )
    flops, flops_source = forward_flops(described)
    kept = saved_activations(described)
    times = max((rows[t] for t in (*call.inputs, *call.outputs)), default=1)
    return Node(
        id=i,
        name=call.name,
        kind=type(call.operation).__name__,
        inputs=call.inputs,
        outputs=call.outputs,
        weights=tuple(weight.id for weight in weights),
        parameters=sum(weight.bytes for weight in weights if weight.trainable),
        constants=sum(weight.bytes for weight in weights if not weight.trainable),
        flops=flops * times,
        function_flops=function_flops(described) * times,
        flops_source=flops_source,
        keeps=kept.tensors,
        residual_bytes=kept.bytes * times,
        residual_source=kept.source,
    )


def _weight(i: int, variable: Any, stateful: bool) -> Weight:
    shape = tuple(int(size) for size in variable.shape)
    return Weight(
        id=i,
        name=variable.path,
        shape=shape,
        dtype=variable.dtype,
        trainable=bool(variable.trainable),
        bytes=math.prod(shape) * item_bytes(variable.dtype),
        stateful=stateful,
    )


def _gradients(
    draft: GraphBuilder, weights: tuple[Weight, ...], uses: list[tuple[int, ...]]
) -> list[bool]:
    """Returns for each tensor whether the backward pass sends a gradient over it."""
    flows = [False] * len(draft.tensors)
    for call, used in zip(draft.calls, uses, strict=True):
        upstream = any(weights[w].trainable for w in used) or any(flows[t] for t in call.inputs)
        if upstream and type(call.operation).__name__ != "StopGradient":
            for t in call.outputs:  # integers and booleans have no gradients
                flows[t] = any(kind in draft.tensors[t].dtype for kind in ("float", "complex"))
    return flows
