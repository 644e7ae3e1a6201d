"""Outputs of the model: how they travel, and the structure in which the model returns them.

Where softmax or sigmoid makes the output of a model, Keras' crossentropies compute with what it
was applied to: probabilities that are rounded to 0 or 1 have lost it. A tensor that comes from
another function, or from another rank, has lost it, too. So the last stage hands on the logits,
and whoever needs the probabilities makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.internals.functional import set_mask
from tarantella_pp.internals.state import only_traced
from tarantella_pp.internals.training import logits_of
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.stage import stage_boundary
from tarantella_pp.runtime.stage.running_calls import Values, run_calls

Activation = Callable[[tf.Tensor], tf.Tensor]

# By the last operation that TensorFlow runs for them; along another axis than the last it is
# another one.
_ACTIVATIONS: dict[str, Activation] = {
    "Sigmoid": keras.activations.sigmoid,
    "Softmax": keras.activations.softmax,
}


def find_activations(extracted: ExtractedModel) -> dict[int, Activation]:
    """For each output of a model that remembers its logits, what makes it of them."""
    makers = {tensor: call for call in extracted.calls for tensor in call.outputs}
    activations: dict[int, Activation] = {}
    for tensor in extracted.graph.outputs:
        if tensor in makers and tensor not in activations:
            activation = _activation(extracted, makers[tensor], tensor)
            if activation is not None:
                activations[tensor] = activation
    return activations


def _activation(extracted: ExtractedModel, call: Call, tensor: int) -> Activation | None:
    tensors = extracted.graph.tensors
    kinds: list[Activation | None] = []

    def trace(*inputs: tf.Tensor) -> None:
        values = Values(dict(zip(call.inputs, inputs, strict=True)))
        run_calls([call], values, training=False)
        made = values.tensors[tensor]
        logits = logits_of(made)
        alike = logits is not None and (logits.dtype, logits.shape) == (made.dtype, made.shape)
        kinds.append(_ACTIVATIONS.get(made.op.type) if alike else None)

    specs = [tf.TensorSpec(tensors[t].shape, tensors[t].dtype) for t in call.inputs]
    with only_traced():  # the layer may be on another rank
        tf.function(trace, input_signature=specs, autograph=False).get_concrete_function()
    return kinds[0]


def as_made(value: tf.Tensor, tensor: int, activations: Mapping[int, Activation]) -> tf.Tensor:
    """The tensor of the model's graph, from the value that was handed on."""
    return activations[tensor](value) if tensor in activations else value


def pack_outputs(
    extracted: ExtractedModel, boundary: stage_boundary.StageBoundary, results: Sequence[tf.Tensor]
) -> Any:
    """Puts what the last stage hands on together as the model's outputs, masks attached."""
    values = dict(zip(boundary.model_outputs, results, strict=True))
    activations = boundary.activations
    flat = []
    for tensor in extracted.graph.outputs:
        value = as_made(values[stage_boundary.BoundaryTensor(tensor)], tensor, activations)
        if stage_boundary.BoundaryTensor(tensor, mask=True) in values:
            value = value if tensor in activations else tf.identity(value)
            set_mask(value, values[stage_boundary.BoundaryTensor(tensor, mask=True)])
        flat.append(value)
    return _unpacked(keras.tree.pack_sequence_as(extracted.outputs_struct, flat))


def symbolic_outputs(extracted: ExtractedModel) -> Any:
    """The model's outputs without values, as losses are given them: Keras marks some as sparse."""

    def dense(tensor: Any) -> Any:
        return keras.KerasTensor(tensor.shape, tensor.dtype)

    return _unpacked(keras.tree.map_structure(dense, extracted.outputs_struct))


def _unpacked(structure: Any) -> Any:
    """A list of one as that one, as Functional models return it."""
    single = isinstance(structure, (list, tuple)) and len(structure) == 1
    return structure[0] if single else structure
