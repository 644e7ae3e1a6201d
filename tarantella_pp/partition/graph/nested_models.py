"""Nested models: which calls of them are opened, so that their operations are nodes."""

from __future__ import annotations

from typing import Any

import keras

from tarantella_pp.internals.functional import (
    get_mask,
    inputs_struct,
    is_plain_call,
    network_of,
    reads_variables,
    tree,
)
from tarantella_pp.partition.graph.layer_graph import Tensor


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
    return (
        given.dtype == inner.dtype
        and len(given.shape) == len(inner.shape)
        and not (inner.sparse or inner.ragged)
    )
