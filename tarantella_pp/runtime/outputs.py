"""The outputs of a pipeline in the structure in which the model returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.partition.extraction import ExtractedModel
from tarantella_pp.partition.keras_internals import set_mask
from tarantella_pp.runtime.layout import Port


def pack_outputs(extracted: ExtractedModel, values: Mapping[Port, tf.Tensor]) -> Any:
    """Puts the outputs of a model together, masks attached.

    Args:
        extracted: The model's graph.
        values: Each output, and its mask where it has one.

    Returns:
        What the model would return.
    """
    flat = []
    for tensor in extracted.graph.outputs:
        value = values[Port(tensor)]
        if Port(tensor, mask=True) in values:
            value = tf.identity(value)
            set_mask(value, values[Port(tensor, mask=True)])
        flat.append(value)
    return unpacked(keras.tree.pack_sequence_as(extracted.outputs_struct, flat))


def unpacked(structure: Any) -> Any:
    """A list of one as that one, as Functional models return it."""
    single = isinstance(structure, (list, tuple)) and len(structure) == 1
    return structure[0] if single else structure
