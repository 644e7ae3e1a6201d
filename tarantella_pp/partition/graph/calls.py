"""From the calls of a model, and the tensors between them, to a layer graph with costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from msgspec.structs import replace

from tarantella_pp.internals.functional import (
    get_mask,
    inputs_struct,
    is_plain_call,
    network_of,
    reads_variables,
    tree,
)
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Source, Tensor, Weight
from tarantella_pp.partition.graph.layer_inside import OpenedLayer
from tarantella_pp.partition.graph.layer_trace import Path
from tarantella_pp.partition.graph.placeholders import SIZES
from tarantella_pp.partition.graph.traced_costs import NodeCost
from tarantella_pp.partition.graph.units import item_bytes, sample_shape


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
    # Ids of the tensors it makes, in the order of the flattened result
    outputs: tuple[int, ...] = ()
    variables: tuple[Any, ...] = ()  # the Keras variables it uses, seeds of random layers included
    # Ids of the inputs that it must see without the mask they were made with: an earlier call has
    # deleted it, in place
    unmasked: frozenset[int] = frozenset()
    # Whether Keras does not tell it whether it trains: a subclassed model without such an argument
    knows_no_training: bool = False
    cost: NodeCost | None = None  # `None` where it could not be traced
    # Of a part of an opened layer, where in it; `arguments`, `bindings` and `unmasked` are those of
    # the whole then, and `inputs` what the part reads
    place: PlaceInside | None = None
    # The model's variables that it reads past its layers: arguments, or by an opened layer's code
    past: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the tensors it reads, each once, in the order of its arguments."""
        given = self.bindings.values() if self.place is None else self.place.reads
        return tuple(dict.fromkeys(given))

    @property
    def kind(self) -> str:
        """Name of the class of what it calls."""
        return type(self.operation if self.place is None else self.place.layer).__name__


@dataclass(frozen=True, slots=True)
class OpenedCall:
    """A call of a layer whose parts are nodes: all that running some of them needs."""

    operation: Any
    layer: OpenedLayer
    # Ids of the tensors that a call inside of it makes
    made: Mapping[Path, tuple[int, ...]]
    tensors: Sequence[Tensor]  # all of the model


@dataclass(frozen=True, slots=True)
class PlaceInside:
    """Where in an opened layer a part of it is."""

    whole: OpenedCall
    path: Path
    layer: Any  # the layer called, or the one that this is the rest of
    reads: tuple[int, ...]  # ids of tensors
    needs: frozenset[int]  # the ones that it reads however it is called


#: Operations whose result is a view of what they are given.
_ALIASES = {
    *("Reshape", "Flatten", "Squeeze", "ExpandDims", "Ravel", "Identity", "StopGradient"),
    "ActivityRegularization",
}


def graph_of(
    found: Sequence[Tensor],
    calls: Sequence[Call],
    variables: tuple[Any, ...],
    states: set[int],
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
) -> LayerGraph:
    """Makes the layer graph of tensors and calls: adds who reads each tensor, and the costs.

    `states` has the `id` of variables that calls change.
    """
    weights = tuple(_weight(i, v, id(v) in states) for i, v in enumerate(variables))
    ids = {id(variable): i for i, variable in enumerate(variables)}
    used = [tuple(weights[ids[id(v)]] for v in call.variables) for call in calls]
    nodes = tuple(_node(i, call, found, used[i]) for i, call in enumerate(calls))
    unknown = any(sample_shape(t.shape, 1) != sample_shape(t.shape, 2) for t in found)
    return LayerGraph(
        nodes=nodes,
        tensors=_tensors(found, nodes),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        assumed_size=SIZES[0] if unknown else None,
    )


def _tensors(found: Sequence[Tensor], nodes: tuple[Node, ...]) -> tuple[Tensor, ...]:
    producers = {t: node.id for node in nodes for t in node.outputs}
    consumers: list[list[int]] = [[] for _ in found]
    aliases: dict[int, int] = {}
    for node in nodes:
        for t in node.inputs:
            consumers[t].append(node.id)
        if node.kind in _ALIASES and len(node.inputs) == len(node.outputs) == 1:
            aliases[node.outputs[0]] = node.inputs[0]
    return tuple(
        replace(
            tensor,
            producer=producers.get(t),
            consumers=tuple(consumers[t]),
            alias_of=aliases.get(t),
        )
        for t, tensor in enumerate(found)
    )


def _node(i: int, call: Call, found: Sequence[Tensor], weights: tuple[Weight, ...]) -> Node:
    cost = call.cost or _guess(call, found, weights)
    source: Source = "estimated" if cost.is_guess else "analytic"
    return Node(
        id=i,
        name=call.name,
        kind=call.kind,
        inputs=call.inputs,
        outputs=call.outputs,
        weights=tuple(weight.id for weight in weights),
        parameters=sum(weight.bytes for weight in weights if weight.trainable),
        flops=cost.flops,
        flops_source=source,
        keeps=cost.keeps,
        residual_bytes=cost.residual_bytes,
        residual_source=source,
        operations=cost.operations,
        needed=cost.needed,
    )


def _guess(call: Call, found: Sequence[Tensor], weights: tuple[Weight, ...]) -> NodeCost:
    """Guesses that matrices are multiplied at each position, and all is kept."""
    made = [found[t] for t in call.outputs]
    entries = [t.bytes_per_sample / item_bytes(t.dtype) for t in made]
    sizes = [(t.shape[-1] if t.shape else 1) or 1 for t in made]
    positions = max((n / size for n, size in zip(entries, sizes, strict=True)), default=1.0)
    matrices = sum(math.prod(weight.shape) for weight in weights if len(weight.shape) > 1)
    kept = (*call.inputs, *call.outputs) if any(t.has_gradient for t in made) else ()
    return NodeCost(2 * matrices * positions + sum(entries), kept, 0.0, is_guess=True)


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


def opened_inputs(node: Any, given: list[Tensor]) -> list[Any] | None:
    """Says how to open a call of a nested model."""
    model = node.operation
    network = network_of(model)
    if network is None or not is_plain_call(model):
        return None
    # Variables read inside must have the dtype that they would have outside.
    if model.compute_dtype != model.variable_dtype and reads_variables(network):
        return None
    args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
    kwargs.pop("training", None)  # the run's own `training` goes before it, as in Keras
    mask = kwargs.pop("mask", None)
    values = list(args) + [kwargs.pop(key) for key in ("inputs",) if key in kwargs]
    if len(values) != 1 or kwargs:  # a call with more than its inputs
        return None
    inputs = _in_order(values[0], inputs_struct(network))
    if inputs is None or not all(isinstance(tensor, keras.KerasTensor) for tensor in inputs):
        return None
    known = {id(tensor): t for tensor, t in zip(node.input_tensors, given, strict=True)}
    if not all(_fits(known[id(t)], inner) for t, inner in zip(inputs, network.inputs, strict=True)):
        return None
    masks = [None] * len(inputs) if mask is None else tree.flatten(mask)
    if len(masks) != len(inputs):
        return None
    known_masks = [get_mask(tensor) for tensor in inputs]
    has_others = any(m is not None and m is not k for m, k in zip(masks, known_masks, strict=True))
    return None if has_others else inputs


def _in_order(value: Any, struct: Any) -> list[Any] | None:
    """Puts the tensors of a call into the order of the nested model's inputs."""
    if isinstance(value, dict) and isinstance(struct, list | tuple):
        names = [tensor.name for tensor in struct if isinstance(tensor, keras.KerasTensor)]
        if len(names) == len(struct) and set(names) <= set(value):
            return [value[name] for name in names]
        return None
    if isinstance(struct, list | tuple) and len(struct) == 1 and not tree.is_nested(value):
        return [value]
    try:
        tree.assert_same_structure(tree.lists_to_tuples(value), tree.lists_to_tuples(struct))
    except (ValueError, TypeError):
        return None
    return list(tree.flatten(value))


def _fits(given: Tensor, inner: Any) -> bool:
    """Returns whether the nested model takes this tensor as it is, without converting it."""
    alike = (given.dtype, len(given.shape)) == (inner.dtype, len(inner.shape))
    return alike and not (inner.sparse or inner.ragged)
