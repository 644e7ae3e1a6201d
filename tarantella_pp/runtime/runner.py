"""Runs the nodes of one stage, as Keras would run them inside the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.partition.draft import Call
from tarantella_pp.partition.keras_internals import get_mask, operation_fn, set_mask
from tarantella_pp.runtime.keras_training import added_losses
from tarantella_pp.runtime.layout import Port, StageLayout
from tarantella_pp.runtime.logits import as_logits, as_made


class StageLayer(keras.layers.Layer):
    """A Keras layer that runs some nodes of a model.

    It tracks the layers of those nodes: a bare loop over them would lose the activity losses of
    a layer that is called twice, because each call outside an enclosing layer starts anew. The
    model itself is neither cloned nor changed.

    Args:
        calls: The stage's calls, in topological order.
        layout: The border of the stage.

    Attributes:
        observe: Is told the results of each call, if it is set.
    """

    def __init__(self, calls: Sequence[Call], layout: StageLayout) -> None:
        super().__init__(name=f"stage_{layout.index}", autocast=False)
        self.calls = tuple(calls)
        self.layout = layout
        self.observe: Callable[[Call, Sequence[Any]], None] | None = None
        layers = [c.operation for c in calls if isinstance(c.operation, keras.layers.Layer)]
        self.tracked = list(dict.fromkeys(layers))
        self.built = True

    def call(
        self, values: Sequence[Any], training: bool
    ) -> tuple[list[Any], list[tuple[str, Any]]]:
        """Runs the nodes.

        Args:
            values: One tensor for each port of `layout.inputs`.
            training: Whether layers run in training mode.

        Returns:
            One tensor for each port of `layout.outputs`, and the losses that the layers added
            (activity regularizers and `add_loss`; not weight regularizers), with their names.
        """
        tensors, masks = self._received(values)
        for call in self.calls:
            for tensor in call.inputs:
                # A layer may have taken the mask off an input that others still need it with.
                hidden = tensor in call.unmasked
                set_mask(tensors[tensor], None if hidden else masks.get(tensor))
            known = {key: tensors[tensor] for key, tensor in call.bindings.items()}
            args, kwargs = call.arguments.fill_in(known)
            results = operation_fn(call.operation, training=training)(*args, **kwargs)
            tensors.update(zip(call.outputs, keras.tree.flatten(results), strict=True))
            if self.observe is not None:
                self.observe(call, [tensors[tensor] for tensor in call.outputs])
            masks.update((tensor, get_mask(tensors[tensor])) for tensor in call.outputs)
        outputs = [self._value(port, tensors, masks) for port in self.layout.outputs]
        return outputs, added_losses(self)

    def _received(self, values: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        tensors: dict[int, Any] = {}
        masks: dict[int, Any] = {}
        for port, value in zip(self.layout.inputs, values, strict=True):
            if port.mask:
                masks[port.tensor] = value
            else:
                tensors[port.tensor] = as_made(value, port.tensor, self.layout.activations)
        return tensors, masks

    def _value(self, port: Port, tensors: Mapping[int, Any], masks: Mapping[int, Any]) -> Any:
        if not port.mask:
            return as_logits(tensors[port.tensor], port.tensor, self.layout.activations)
        mask = masks.get(port.tensor)
        if mask is None:
            raise UnsupportedModelError(
                f"Stage {self.layout.index} should hand on a mask with tensor {port.tensor}, as "
                "the model's graph says, but the layer that makes the tensor computed none. "
                "Make its `compute_mask` depend on the presence of a mask only."
            )
        return mask
