"""A stage traced for being tried out: any number of rows, nothing written, gradients in short."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tarantella_pp.keras_internals.training import moving_statistics
from tarantella_pp.partition.extraction.calls import Call
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.probes.sample_rows import samples_back, samples_first
from tarantella_pp.runtime.tf_graph.compiled_function import CompiledFunction, unoptimized
from tarantella_pp.runtime.tf_graph.subgraph import SubgraphExtractor

Array = NDArray[Any]

TOLERANCES = {tf.float64: 1e-10, tf.float32: 1e-5, tf.bfloat16: 2e-2, tf.float16: 2e-2}
"""How far numbers may be apart, relative to the largest, that are computed in the same way."""


@dataclass(frozen=True)
class Trial:
    """What a stage made of some rows.

    Attributes:
        outputs: Its outputs.
        added: The losses that its layers added.
        input_gradients: The gradients of its inputs.
        weight_gradients: For each weight that gets a gradient, a product of the gradient with a
            fixed direction, and the length of the gradient.
    """

    outputs: list[Array]
    added: Array
    input_gradients: list[Array]
    weight_gradients: Array


class ProbeTrace:
    """Forward pass of a stage, and the gradient of a loss that is made up for it.

    What goes in and comes out has its samples along the first dimension.

    Batch normalizations use their moving statistics: that they couple samples is known. What the
    forward pass would write is left out, so that trying it out changes nothing.

    Attributes:
        function: The traced function.
        results_batched: For each output, then each gradient of an input, whether it has samples.
        weights: The weights that get a gradient.
        added_by: For each added loss the name of the layer that adds it.
        drawn_by: The calls that drew random numbers of Python or NumPy while they were traced.
    """

    def __init__(self, module: StageModule, specs: Sequence[tf.TensorSpec], training: bool) -> None:
        self._module = module
        self._specs = list(specs)
        self._training = training
        ports = [*module.boundary.outputs, *module.boundary.input_gradients]
        axes = module.boundary.axes_of(port.tensor for port in ports)
        self.results_batched = [axis is not None for axis in axes]
        self._parts: list[list[tf.Tensor]] = []
        self._made: list[tuple[Call, list[tf.Tensor]]] = []
        self.weights: list[Any] = []
        self.added_by: tuple[str, ...] = ()
        self.drawn_by: list[Call] = []
        self._numbers = _random_numbers()
        kept = tf.TensorSpec([None], tf.bool)
        factors = tf.TensorSpec([None], keras.config.floatx())
        self._signature = [kept, factors, *specs]
        traced = tf.function(self._trace, input_signature=self._signature, autograph=False)
        self.function = traced.get_concrete_function()
        self._feeds = self.function.inputs[: len(self._signature)]

    def __call__(self, rows: Array, factors: Array, inputs: Sequence[tf.Tensor]) -> Trial:
        """Tries the stage out."""
        given = [tf.constant(rows), tf.constant(factors, keras.config.floatx()), *inputs]
        found = iter([_array(tensor) for tensor in self._run(*given)])
        parts = [[next(found) for _ in part] for part in self._parts]
        products, lengths = parts[3] or [np.zeros(0)] * 2
        return Trial(parts[0], parts[1][0], parts[2], np.stack([products.ravel(), lengths], -1))

    def outputs(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The stage's outputs for some inputs, as it hands them on."""
        nothing = tf.zeros([0], tf.bool), tf.zeros([0], keras.config.floatx())
        found = self._compiled(self._parts[0])(*nothing, *inputs)
        boundary = self._module.boundary
        return samples_back(list(found), boundary.axes_of(port.tensor for port in boundary.outputs))

    def results(self, inputs: Sequence[tf.Tensor], rows: Array) -> list[list[Array]]:
        """The results of each of the stage's calls, in order."""
        fetches = [tensor for _, tensors in self._made for tensor in tensors]
        factors = tf.zeros([0], keras.config.floatx())
        found = iter(self._compiled(fetches)(tf.constant(rows), factors, *inputs))
        return [[_array(next(found)) for _ in tensors] for _, tensors in self._made]

    @functools.cached_property
    def _run(self) -> Callable[..., list[tf.Tensor]]:
        return self._compiled([tensor for part in self._parts for tensor in part])

    @property
    def tolerance(self) -> float:
        """How far results may be apart that were computed in the same way."""
        operations = self.function.graph.get_operations()
        dtypes = {tensor.dtype for op in operations for tensor in op.outputs}
        return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the stage draws random numbers."""
        definition = self.function.graph.as_graph_def()
        functions = (function.node_def for function in definition.library.function)
        nodes = itertools.chain(definition.node, *functions)
        return any("Random" in node.op or "Normal" in node.op for node in nodes)

    @property
    def calls(self) -> list[Call]:
        """The stage's calls in the order of `results`."""
        return [call for call, _ in self._made]

    def batched_of(self, call: Call) -> list[bool]:
        """For each result of a call whether it has samples."""
        return [axis is not None for axis in self._module.boundary.axes_of(call.outputs)]

    def _compiled(self, fetches: Sequence[tf.Tensor]) -> Callable[..., list[tf.Tensor]]:
        carved = SubgraphExtractor(self.function).extract(self._feeds, fetches)
        compiled = CompiledFunction(lambda *values: carved(*values), self._signature)
        return unoptimized()(compiled.__call__)

    def _trace(self, kept: tf.Tensor, factors: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        module, layer, boundary = self._module, self._module.layer, self._module.boundary
        layer.observe = self._observe
        real = samples_back(inputs, boundary.axes_of(port.tensor for port in boundary.inputs))
        try:
            with moving_statistics(layer):
                results, added = module.run(real, self._training)
        finally:
            layer.observe = None
        outputs = samples_first(results, boundary.axes_of(port.tensor for port in boundary.outputs))
        given: list[tf.Tensor] = []
        gradients: list[Any] = []
        if self._training:
            given, gradients = self._gradients(kept, factors, inputs, outputs, added)
        pairs = zip(module.accumulator.weights, gradients, strict=False)
        found = [(weight, gradient) for weight, gradient in pairs if gradient is not None]
        self.weights = [weight for weight, _ in found]
        self.added_by = module.added_by[self._training]
        shortened = _in_short(self.weights, [gradient for _, gradient in found])
        self._parts = [list(outputs), [added], given, shortened]
        return added

    def _observe(self, call: Call, results: Sequence[Any]) -> None:
        tensors = list(map(tf.convert_to_tensor, results))
        axes = self._module.boundary.axes_of(call.outputs)
        self._made.append((call, samples_first(tensors, axes)))
        if self._numbers != (numbers := _random_numbers()):
            self.drawn_by.append(call)
            self._numbers = numbers

    def _gradients(
        self,
        kept: tf.Tensor,
        factors: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        added: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[Any]]:
        sources, variables = self._module.sources(inputs), self._module.variables
        targets = self._module.targets(outputs, added)
        seeds = [tf.reshape(factors, tf.shape(added))]
        axes = self._module.boundary.axes_of(
            port.tensor for port in self._module.boundary.outputs_with_gradient
        )
        for axis, target in zip(axes, targets[1:], strict=True):
            mask = tf.zeros_like(target) if axis is None else _mask(kept, target)
            seeds.append(_pattern(target) * mask)
        try:
            found = tf.gradients(targets, [*sources, *variables], grad_ys=seeds)
        except (NotImplementedError, LookupError):  # such a stage runs on a tape
            return [], []
        pairs = zip(sources, found, strict=False)
        given = [tf.zeros_like(s) if g is None else tf.convert_to_tensor(g) for s, g in pairs]
        return given, found[len(sources) :]


def _random_numbers() -> Any:
    """The states of the generators that all of the process shares."""
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - layers may use it
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]


def _array(tensor: tf.Tensor) -> Array:
    array: Array = tensor.numpy()
    return array.astype(np.float64) if tensor.dtype.is_floating else array


def _pattern(tensor: tf.Tensor) -> tf.Tensor:
    """Numbers of both signs with no simple relation between them."""
    wave = tf.cos(1.7 * tf.cast(tf.range(tf.size(tensor)), tf.float64) + 1.0)
    return tf.reshape(tf.cast(wave, tensor.dtype), tf.shape(tensor))


def _mask(kept: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Ones in the rows of a tensor that belong to kept samples, zeros elsewhere."""
    if not tensor.shape.rank:
        return tf.zeros((), tensor.dtype)
    samples, first = tf.shape(kept)[0], tf.shape(tensor)[0]
    places = tf.range(first) // tf.maximum(first // samples, 1)
    rows = tf.gather(kept, tf.minimum(places, samples - 1)) & (first % samples == 0)
    return tf.cast(tf.reshape(rows, [-1, *[1] * (tensor.shape.rank - 1)]), tensor.dtype)


def _in_short(weights: Sequence[Any], gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Products of gradients with a fixed direction, and their lengths: large ones are not kept."""
    if not gradients:
        return []
    doubles = any(gradient.dtype == tf.float64 for gradient in gradients)
    dtype = tf.float64 if doubles else tf.float32
    direction = functools.cache(functools.partial(_direction, dtype))
    products, squares = [], []
    for weight, gradient in zip(weights, gradients, strict=True):
        rows, columns = weight.shape[0] if len(weight.shape) else 1, math.prod(weight.shape[1:])
        left, right = direction(rows, 1.3, 0.5), direction(columns, 1.7, 1.0)
        values = gradient
        if isinstance(gradient, tf.IndexedSlices):
            values, left = gradient.values, tf.gather(left, gradient.indices)
        values = tf.reshape(tf.cast(values, dtype), [-1, columns])
        products.append(tf.matmul(left, tf.matmul(values, right), transpose_a=True))
        squares.append(tf.nn.l2_loss(values))
    return [tf.concat(products, 0), tf.sqrt(2 * tf.stack(squares))]


def _direction(dtype: tf.DType, size: int, pace: float, start: float) -> tf.Tensor:
    """A column of numbers of both signs with no simple relation between them."""
    return tf.constant(np.cos(pace * np.arange(size) + start)[:, np.newaxis], dtype)
