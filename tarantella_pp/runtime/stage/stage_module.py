"""What a stage computes with: layers, and gradients summed over the micro-batches of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.training import added_losses, logits_of
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.stage.forward_state import BatchStatistics
from tarantella_pp.runtime.stage.model_outputs import as_made
from tarantella_pp.runtime.stage.running_calls import Observer, Values, run_calls
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor, StageBoundary
from tarantella_pp.runtime.weights.slices import Slices, put_together


class GradientAccumulator:
    """One sum for each trainable weight of a stage.

    Dense gradients add up in place. Sparse ones (of an embedding) are collected as they are:
    Keras' optimizers treat the slices of a batch one by one, so merging equal rows would
    change the result. Only slices at places in which no sample has a say, such as positions, are
    one and the same for all of the batch: they add up.
    Weights that no gradient reaches have no sum, as in plain Keras.
    """

    def __init__(self, weights: Sequence[Any]) -> None:
        self.weights = list(weights)
        # For each lookup of a weight whether it reads the same rows whatever the samples are.
        self.fixed: Mapping[int, Sequence[bool]] = {}
        # Where no gradient gets to this stage's weight the sum is nothing but zeros.
        self.reached = [True] * len(self.weights)
        self._known = False
        self._dense: list[tf.Variable | None] = [None] * len(self.weights)
        self._sparse: dict[int, list[Slices]] = {}
        self._empty = True

    def prepare(self, gradients: Sequence[Any]) -> None:
        """Learns from the gradients of one micro-batch what kind each weight's is."""
        if self._known:
            return
        for i, (gradient, weight) in enumerate(zip(gradients, self.weights, strict=True)):
            if isinstance(gradient, tuple):
                self._sparse[i] = []
            elif gradient is not None:
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._dense[i] = tf.Variable(zeros, trainable=False, name="gradient_sum")
        self._known = True  # last, for an error may come before

    def begin(self) -> bool:
        """Returns whether nothing has been added since the last reset; call it before adding."""
        empty, self._empty = self._empty, False
        return empty

    def add_dense(self, gradients: Sequence[Any], first: tf.Tensor | bool) -> None:
        """Adds the dense gradients of a micro-batch; the first ones replace the old."""
        pairs = zip(self._dense, gradients, strict=True)
        dense = [(total, gradient) for total, gradient in pairs if total is not None]
        if dense:
            tf.cond(
                first,
                lambda: tf.group(*(total.assign(gradient) for total, gradient in dense)),
                lambda: tf.group(*(total.assign_add(gradient) for total, gradient in dense)),
            )

    def slices_of(self, gradients: Sequence[Any]) -> list[Slices]:
        """The sparse gradients of a micro-batch, as `collect` takes them."""
        return [gradients[i] for i in self._sparse]

    def collect(self, slices: Sequence[Slices]) -> None:
        """Collects the sparse gradients of a micro-batch."""
        for kept, each in zip(self._sparse.values(), slices, strict=True):
            kept.append(each)

    def take_collected(self) -> dict[int, tf.IndexedSlices]:
        """The sparse gradients of all micro-batches so far, by weight; forgets them one by one."""
        collected: dict[int, tf.IndexedSlices] = {}
        for i, kept in self._sparse.items():
            if kept:
                collected[i] = put_together(kept, self.fixed.get(i, ()), self.weights[i])
                kept.clear()
        return collected

    def has(self, index: int) -> bool:
        """Whether a gradient gets to one weight, once the first step has found that out."""
        return self.reached[index] and (self._dense[index] is not None or index in self._sparse)

    def gradient(self, index: int, collected: dict[int, tf.IndexedSlices]) -> Any:
        """The sum for one weight, for the optimizer; works inside a `tf.function`."""
        if not self.reached[index]:
            return None
        total = self._dense[index]
        if total is not None:
            return tf.convert_to_tensor(total)
        return collected.get(index)

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._empty = True
        for kept in self._sparse.values():
            kept.clear()


class StageModule:
    """The nodes of one stage, and one gradient sum for each of its trainable weights."""

    def __init__(self, boundary: StageBoundary, calls: Sequence[Call]) -> None:
        self.boundary = boundary
        self.layer = StageLayer(calls, boundary)
        self.accumulator = GradientAccumulator(self.layer.trainable_variables)
        self.statistics = BatchStatistics(self.layer)
        # The layers that add losses in training, and otherwise; known once it has run.
        self.added_by: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        # Variables of layers' metrics that are means, in training and otherwise: a micro-batch
        # counts in them by its share. Trying the stage out shows which.
        self.means: dict[bool, list[Any]] = {True: [], False: []}
        # Whether some input gets no gradient although it could; the passes find out.
        self.blocks = False

    @property
    def variables(self) -> list[Any]:
        """TensorFlow's variables of the trainable weights, to differentiate by."""
        return [weight.value for weight in self.accumulator.weights]

    def run(
        self, inputs: Sequence[tf.Tensor], training: bool, tried: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs the nodes on one micro-batch."""
        gathers = contextlib.nullcontext() if tried else self.statistics.gathered(self.layer)
        with gathers:
            given = None if self.layer.knows_no_training else training
            outputs, losses = self.layer(inputs, training=given)
        dtype = keras.config.floatx()
        self.added_by[training] = tuple(name for name, _ in losses)
        added = [tf.cast(tf.reduce_sum(loss), dtype) for _, loss in losses]
        return outputs, tf.stack(added) if added else tf.zeros([0], dtype)

    def sources(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The `inputs` whose gradient the stage sends back."""
        values = dict(zip(self.boundary.inputs, inputs, strict=True))
        return [values[tensor] for tensor in self.boundary.input_gradients]

    def targets(self, outputs: Sequence[tf.Tensor], added: tf.Tensor) -> list[tf.Tensor]:
        """What is differentiated: the added losses, then each output that a gradient reaches."""
        values = dict(zip(self.boundary.outputs, outputs, strict=True))
        return [added, *(values[tensor] for tensor in self.boundary.outputs_with_gradient)]

    def parted(
        self, sources: Sequence[tf.Tensor], gradients: Sequence[Any]
    ) -> tuple[list[tf.Tensor], Sequence[Any]]:
        """Gradients of inputs, zeros where there is none, and of weights."""
        pairs = list(zip(sources, gradients, strict=False))
        self.blocks |= any(gradient is None for _, gradient in pairs)
        back = [tf.zeros_like(s) if g is None else tf.convert_to_tensor(g) for s, g in pairs]
        return back, gradients[len(sources) :]

    def connected(
        self, specs: Sequence[tf.TensorSpec], coming: Sequence[bool]
    ) -> tuple[list[bool], list[bool]]:
        """Finds out where gradients get to; runs nothing."""
        connected: list[bool] = []

        def trace(*inputs: tf.Tensor) -> None:
            wanted = [*self.sources(inputs), *self.variables]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(wanted)
                targets = self.targets(*self.run(inputs, training=True))
                kept = [t for t, comes in zip(targets, [True, *coming], strict=True) if comes]
            connected.extend(gradient is not None for gradient in tape.gradient(kept, wanted))

        tf.function(trace, input_signature=list(specs), autograph=False).get_concrete_function()
        inputs = len(self.boundary.input_gradients)
        return connected[:inputs], connected[inputs:]


class StageLayer(keras.layers.Layer):
    """A Keras layer that runs some nodes of a model.

    It tracks the layers of those nodes: a bare loop over them would lose the activity losses of
    a layer that is called twice, because each call outside an enclosing layer starts anew. The
    model itself is neither cloned nor changed.
    """

    def __init__(self, calls: Sequence[Call], boundary: StageBoundary) -> None:
        super().__init__(name=f"stage_{boundary.index}", autocast=False)
        self.calls = tuple(calls)
        self.knows_no_training = any(call.knows_no_training for call in calls)
        self.boundary = boundary
        self.observe: Observer | None = None
        layers = [c.operation for c in calls if isinstance(c.operation, keras.layers.Layer)]
        self.tracked = list(dict.fromkeys(layers))
        # What is read past these layers
        held = {id(v) for layer in self.tracked for v in layer.variables}
        read = {id(v): v for call in calls for v in call.past}
        self.read = [v for key, v in read.items() if key not in held]
        self.built = True

    def call(
        self, values: Sequence[Any], training: bool | None = None
    ) -> tuple[list[Any], list[tuple[str, Any]]]:
        """Runs the nodes."""
        known = Values({}, observe=self.observe)
        for tensor, value in zip(self.boundary.inputs, values, strict=True):
            if tensor.mask:
                known.masks[tensor.tensor] = value
            else:
                made = as_made(value, tensor.tensor, self.boundary.activations)
                known.tensors[tensor.tensor] = made
        losses = run_calls(self.calls, known, training)
        outputs = [self._value(tensor, known) for tensor in self.boundary.outputs]
        return outputs, [*added_losses(self), *losses]

    def _value(self, tensor: BoundaryTensor, known: Values) -> Any:
        if not tensor.mask:
            value = known.tensors[tensor.tensor]
            return logits_of(value) if tensor.tensor in self.boundary.activations else value
        mask = known.masks.get(tensor.tensor)
        if mask is None:
            raise UnsupportedModelError(
                f"Stage {self.boundary.index} should hand on a mask with tensor {tensor.tensor}, "
                "as the model's graph says, but the layer that makes the tensor computed none. "
                "Make its `compute_mask` depend on the presence of a mask only."
            )
        return mask
