"""Forward and backward of a stage from one traced graph, cut in three."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.internals.training import without_graph
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.partition.graph.traced_costs import bytes_of, memory_of
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction, FlatGradients, specs_of
from tarantella_pp.runtime.stage.graph_split import CutError, GraphSplit, Trace, split_graph
from tarantella_pp.runtime.stage.stage_module import StageModule
from tarantella_pp.runtime.weights.slices import Slices

# Makes gradients of values in the places of the components of a stage's gradients.
Rebuilt: TypeAlias = Callable[[Sequence[Any]], list[Any]]
_KEY, _FLAG = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool)


class SplitBackward:
    """Traces a stage once, forward and backward, and cuts the graph into F, B and W."""

    def __init__(
        self, module: StageModule, specs: Sequence[tf.TensorSpec], flops_per_byte: Sequence[float]
    ) -> None:
        self._module = module
        self._flops_per_byte = flops_per_byte  # of each call
        trace, rebuilt = self._trace(specs)
        cut = split_graph(trace)
        self._kept = self._whole = BackwardParts(cut, trace, module, rebuilt)
        if cut.repeats:  # other stages have no R
            again = split_graph(trace, cut.residuals)
            self._whole = BackwardParts(again, trace, module, rebuilt)
        # Kept for each micro-batch, unknown rows as one; `None` where loops keep lists
        self.residual_bytes = self._kept.residual_bytes
        self._repeated: set[int] = set()  # micro-batches whose R has run
        self._seeds: dict[int, Sequence[tf.Tensor]] = {}
        self._num_outputs = len(trace.outputs)
        # Where all up to here is frozen nothing was kept, and there is nothing to compute.
        self._has_gradients = bool(trace.input_gradients or trace.weight_gradients)
        self._forward = CompiledFunction(self._run_forward, [_KEY, *specs])
        # Python's graph has 7 KB an operation. The functions of loops end with it, but parts that
        # are yet to be compiled call them.
        self._loops = trace.function if trace.extractor.calls_functions else None
        if self._loops is None:
            without_graph(trace.function)

    @functools.cached_property
    def _repeat(self) -> CompiledFunction:
        """R, which few schedules have."""
        return CompiledFunction(self._run_repeat, [_KEY])

    def forward(self, key: int, inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs micro-batch `key` forward and keeps its residuals."""
        *outputs, added = self._forward(_key(key), *inputs)
        return outputs, added

    def repeat(self, key: int) -> None:
        """Makes again, and keeps, what the backward pass of `key` would repeat that is dear."""
        if self._whole is not self._kept:
            self._repeated.add(key)  # first: `clear` must know of it if an error comes midway
            self._repeat(_key(key))

    def backward(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs `key` backward: accumulates weight gradients, returns the input gradients."""
        if not self._has_gradients:
            return []
        first = _flag(self._module.accumulator.begin())
        gradients = self._parts(key).both(_key(key), first, *seeds)
        self._repeated.discard(key)
        self._collect(gradients[self._kept.num_back :])
        return gradients[: self._kept.num_back]

    def backward_input(self, key: int, seeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs B of `key` and keeps what W needs; with no input gradients, W does it all."""
        # The first stage sends no gradient back: all its work may wait, and is compiled as one.
        if self._kept.num_back:
            return self._parts(key).of_inputs(_key(key), *seeds)
        self._seeds[key] = seeds
        return []

    def backward_weight(self, key: int) -> None:
        """Runs W of `key` and drops what was kept."""
        if self._kept.num_back:
            first = _flag(self._module.accumulator.begin())
            self._collect(self._parts(key).of_weights(_key(key), first))
            self._repeated.discard(key)
        else:
            self.backward(key, self._seeds.pop(key))

    def _parts(self, key: int) -> BackwardParts:
        return self._whole if key in self._repeated else self._kept

    def _collect(self, gradients: Sequence[tf.Tensor]) -> None:
        if gradients:
            every = zip(gradients[::3], gradients[1::3], gradients[2::3], strict=True)
            self._module.accumulator.collect(list(every))

    def clear(self) -> None:
        """Drops the residuals of micro-batches in flight."""
        self._seeds.clear()
        self._kept.clear()
        if self._repeated:
            self._whole.clear()
        self._repeated.clear()

    def _run_forward(self, key: tf.Tensor, *inputs: tf.Tensor) -> list[tf.Tensor]:
        results = self._kept.run_forward(*inputs)
        self._kept.put(key, results[self._num_outputs :])
        return results[: self._num_outputs]

    def _run_repeat(self, key: tf.Tensor) -> list[tf.Tensor]:
        self._whole.put(key, self._whole.run_forward(*self._kept.take(key)))
        return []

    def _trace(self, specs: Sequence[tf.TensorSpec]) -> tuple[Trace, Rebuilt]:
        """Forward and gradients of one micro-batch, in one graph."""
        found: dict[str, Any] = {}
        layer = self._module.layer
        made: list[tuple[Call, int]] = []  # how many operations there are after each call

        def count(call: Call, results: Sequence[Any]) -> None:
            made.append((call, len(tf.compat.v1.get_default_graph().get_operations())))

        def whole(*inputs: tf.Tensor) -> list[tf.Tensor]:
            layer.observe = count
            outputs, added = self._module.run(inputs, training=True)
            layer.observe = None
            targets = self._module.targets(outputs, added)
            # Placeholders, for gradients come from other stages long after the forward pass.
            seeds = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
            sources = self._module.sources(inputs)
            wanted = [*sources, *self._module.variables]
            gradients = tf.gradients(targets, wanted, grad_ys=seeds)
            back, of_weights = self._module.parted(sources, gradients)
            found.update(
                inputs=inputs,
                seeds=seeds,
                outputs=[*outputs, added],
                input_gradients=back,
                of_weights=FlatGradients(of_weights),
            )
            return [*outputs, added]

        traced = tf.function(whole, input_signature=list(specs), autograph=False)
        try:
            function = traced.get_concrete_function()
        except (NotImplementedError, LookupError) as error:
            raise CutError(f"TensorFlow cannot differentiate the graph: {error}") from error
        prices = self._prices(function.graph.get_operations(), made)
        gradients = found.pop("of_weights")
        self._module.accumulator.prepare(gradients.rebuilt(gradients.tensors))
        trace = Trace(
            function=function, weight_gradients=gradients.tensors, flops_per_byte=prices, **found
        )
        return trace, gradients.rebuilt

    def _prices(
        self, operations: Sequence[tf.Operation], made: Sequence[tuple[Call, int]]
    ) -> Callable[[tf.Operation], float]:
        """What a byte is worth that an operation would make again."""
        least = min(self._flops_per_byte)
        own = dict(zip(map(id, self._module.layer.calls), self._flops_per_byte, strict=True))
        begins = [0, *(end for _, end in made)]
        prices = {
            op: own[id(call)]
            for begin, (call, end) in zip(begins, made, strict=False)
            for op in operations[begin:end]
        }
        return lambda op: prices.get(op, least)


class BackwardParts:
    """B, W and both in one of a stage that is cut, and what micro-batches keep for them."""

    def __init__(
        self, cut: GraphSplit, trace: Trace, module: StageModule, rebuilt: Rebuilt
    ) -> None:
        self._module = module
        self._rebuilt = rebuilt
        self.run_forward = cut.forward  # its residuals are for `put`
        self._backward, self._backward_input = cut.backward, cut.backward_input
        self._backward_weight = cut.backward_weight
        self._num_early = len(cut.kept_for_b)
        self.residual_bytes = _bytes_of(cut.residuals)
        self._early, self._late, self._between = map(
            ActivationStash, (cut.kept_for_b, cut.kept_for_w, cut.b_to_w)
        )
        self.num_back = len(trace.input_gradients)
        self._seeds = specs_of(trace.seeds)

    # A schedule uses either the one or the two others, and each takes long to compile.
    @functools.cached_property
    def both(self) -> CompiledFunction:
        """Input gradients and weight gradients, in one."""
        return CompiledFunction(self._run_both, [_KEY, _FLAG, *self._seeds])

    @functools.cached_property
    def of_inputs(self) -> CompiledFunction:
        """B."""
        return CompiledFunction(self._run_of_inputs, [_KEY, *self._seeds])

    @functools.cached_property
    def of_weights(self) -> CompiledFunction:
        """W."""
        return CompiledFunction(self._run_of_weights, [_KEY, _FLAG])

    def put(self, key: tf.Tensor, residuals: Sequence[tf.Tensor]) -> None:
        """Keeps residuals of a micro-batch."""
        self._early.put(key, residuals[: self._num_early])
        self._late.put(key, residuals[self._num_early :])

    def take(self, key: tf.Tensor) -> list[tf.Tensor]:
        """The residuals of a micro-batch, which are dropped."""
        return [*self._early.take(key), *self._late.take(key)]

    def clear(self) -> None:
        """Drops all residuals."""
        for store in (self._early, self._late, self._between):
            store.clear()

    def _run_both(self, key: tf.Tensor, first: tf.Tensor, *seeds: tf.Tensor) -> Any:
        results = self._backward(*seeds, *self.take(key))
        return results[: self.num_back], self._accumulate(results[self.num_back :], first)

    def _run_of_inputs(self, key: tf.Tensor, *seeds: tf.Tensor) -> list[tf.Tensor]:
        kept = [*self._early.take(key), *self._late.peek(key)]
        results = self._backward_input(*seeds, *kept)
        self._between.put(key, results[self.num_back :])
        return results[: self.num_back]

    def _run_of_weights(self, key: tf.Tensor, first: tf.Tensor) -> list[Slices]:
        kept = [*self._late.take(key), *self._between.take(key)]
        return self._accumulate(self._backward_weight(*kept), first)

    def _accumulate(self, components: Sequence[tf.Tensor], first: tf.Tensor) -> list[Slices]:
        """Adds up the dense gradients, and returns those that are collected."""
        gradients = self._rebuilt(components)
        self._module.accumulator.add_dense(gradients, first)
        return self._module.accumulator.slices_of(gradients)


@functools.cache
def _key(micro_batch: int) -> tf.Tensor:
    return tf.constant(micro_batch, tf.int64)


_flag = functools.cache(tf.constant)


def _bytes_of(tensors: Sequence[tf.Tensor]) -> int | None:
    """Bytes of tensors, each memory once; `None` if lists of tensors are among them."""
    if any(tensor.dtype == tf.variant for tensor in tensors):
        return None
    memory: dict[Any, int] = {}  # bytes by the tensor that has them
    for tensor in tensors:
        memory[memory_of(tensor).ref()] = int(bytes_of(tensor))
    return sum(memory.values())


_names = itertools.count()


class ActivationStash:
    """Keeps tensors inside TensorFlow, for any number of micro-batches.

    A function call costs about 33 microseconds for each tensor argument; 150 residuals would cost
    5 ms per micro-batch. TensorFlow's own staging map holds them at under 1 ms.
    """

    def __init__(self, like: Sequence[tf.Tensor]) -> None:
        self._like = [(tensor.dtype, tensor.shape) for tensor in like]
        self._name = f"tarantella_store_{next(_names)}"

    def put(self, key: tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps `tensors` for micro-batch `key` (a scalar int64); for use in a `tf.function`."""
        if self._like:
            tf.raw_ops.MapStage(
                key=key,
                indices=list(range(len(self._like))),
                values=list(tensors),
                dtypes=[dtype for dtype, _ in self._like],
                shared_name=self._name,
            )

    def peek(self, key: tf.Tensor) -> list[tf.Tensor]:
        """The tensors kept for micro-batch `key`, which stay."""
        return self._read(tf.raw_ops.MapPeek, key)

    def take(self, key: tf.Tensor) -> list[tf.Tensor]:
        """The tensors kept for micro-batch `key`, which are dropped."""
        return self._read(tf.raw_ops.MapUnstage, key)

    def clear(self) -> None:
        """Drops everything, for instance after a step that an error cut short."""
        if self._like:
            dtypes = [dtype for dtype, _ in self._like]
            tf.raw_ops.MapClear(dtypes=dtypes, shared_name=self._name)

    def _read(self, read: Callable[..., Any], key: tf.Tensor) -> list[tf.Tensor]:
        # One operation per tensor: with one operation of many outputs TensorFlow 2.21's remapper
        # takes two of its outputs for the same tensor and fuses BiasAddGrad with the wrong one.
        tensors = []
        for index, (dtype, shape) in enumerate(self._like):
            value = read(key=key, indices=[index], dtypes=[dtype], shared_name=self._name)[0]
            value.set_shape(shape)
            tensors.append(value)
        return tensors
