"""The outputs of a pipeline in the structure in which the model returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.partition.extraction import ExtractedModel
from tarantella_pp.partition.keras_internals import set_mask
from tarantella_pp.runtime.layout import Port
from tarantella_pp.runtime.logits import Activation, as_made


def pack_outputs(
    extracted: ExtractedModel,
    values: Mapping[Port, tf.Tensor],
    activations: Mapping[int, Activation],
) -> Any:
    """Puts the outputs of a model together, masks attached.

    Args:
        extracted: The model's graph.
        values: Each output, and its mask where it has one.
        activations: Outputs that are given as their logits, and what makes them of these.

    Returns:
        What the model would return.
    """
    flat = []
    for tensor in extracted.graph.outputs:
        value = as_made(values[Port(tensor)], tensor, activations)
        if Port(tensor, mask=True) in values:
            value = value if tensor in activations else tf.identity(value)
            set_mask(value, values[Port(tensor, mask=True)])
        flat.append(value)
    return unpacked(keras.tree.pack_sequence_as(extracted.outputs_struct, flat))


def unpacked(structure: Any) -> Any:
    """A list of one as that one, as Functional models return it."""
    single = isinstance(structure, (list, tuple)) and len(structure) == 1
    return structure[0] if single else structure
