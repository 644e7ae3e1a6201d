"""A step of the user's that is ready to be run on shares of batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.step_probe import StepKinds
from tarantella_pp.custom_steps.step_trace import StepTrace, Update
from tarantella_pp.errors import ReplicaError, UnsupportedModelError
from tarantella_pp.partition.options import fusion_threshold_of
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.data.batch import Batch
from tarantella_pp.runtime.probes.parts import MEAN, SAME, SUM
from tarantella_pp.runtime.stage.graph_functions import (
    CompiledFunction,
    SubgraphExtractor,
    frontier,
)
from tarantella_pp.runtime.stage.graph_split import has_effect
from tarantella_pp.runtime.weights.forward_state import BatchStatistics
from tarantella_pp.runtime.weights.gradient_reduction import (
    Gradient,
    GradientReduction,
    in_buckets,
)
from tarantella_pp.runtime.weights.process_groups import ReplicaExchange


@dataclass(frozen=True)
class _Part:
    """What runs between two updates."""

    call: CompiledFunction  # the compiled part
    needs: list[tf.Tensor]  # what it is given, of the batch and of earlier parts
    gives: list[tf.Tensor]  # what it returns


# A traced step is cut where weights are updated, and compiled part by part.
#
#     def train_step(data):                 one graph, in the order in which it was made
#         ...                               part 0
#         optimizer.apply(gradients)   -->  ------------- gradients of all replicas, update
#         ...                               part 1: reads the new weights
#
# TensorFlow makes operations in the order in which the step is written. So all that was made before
# an update runs before it, and all else after it, as if the step ran line by line.
class StepProgram:
    """Runs a step as it is written, with updates that are made outside of its graph."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        operations = trace.graph.get_operations()
        self._places = {op: place for place, op in enumerate(operations)}
        self._bounds = [update.place for update in trace.updates]
        self._carve = SubgraphExtractor(trace.function).extract
        count = len(self._bounds) + 1
        wanted: list[list[tf.Tensor]] = [list(update.tensors) for update in trace.updates]
        wanted.append(trace.outputs)
        self._parts: list[_Part] = []
        for number in reversed(range(count)):
            self._parts.insert(0, self._part(number, wanted))

    def run(
        self, tensors: Sequence[tf.Tensor], update: Callable[[int, list[tf.Tensor]], None]
    ) -> list[tf.Tensor]:
        """Runs the step."""
        known = {t.ref(): value for t, value in zip(self._trace.inputs, tensors, strict=True)}
        for number, part in enumerate(self._parts):
            values = part.call(*(known[tensor.ref()] for tensor in part.needs))
            known |= {t.ref(): value for t, value in zip(part.gives, values, strict=True)}
            if number < len(self._bounds):
                wanted = self._trace.updates[number].tensors
                update(number, [known[tensor.ref()] for tensor in wanted])
        return [known[tensor.ref()] for tensor in self._trace.outputs]

    def _part(self, number: int, wanted: list[list[tf.Tensor]]) -> _Part:
        """Carves a part out; what it needs of earlier ones is added to what they are to give."""
        gives = list({tensor.ref(): tensor for tensor in wanted[number]}.values())
        effects = [op for op in self._places if self._number(op) == number and has_effect(op)]
        sources = [tensor for op in effects for tensor in op.inputs]
        given, _ = frontier([*gives, *sources], lambda tensor: self._is_given(tensor, number))
        needs = list({tensor.ref(): tensor for tensor in given}.values())
        for tensor in needs:
            if tensor.dtype == tf.resource:
                raise UnsupportedModelError(
                    f"The step makes a resource ('{tensor.op.name}') before it applies gradients "
                    "and uses it afterwards. Make it in the model's __init__."
                )
            if tensor.op.type != "Placeholder":
                wanted[self._number(tensor.op)].append(tensor)
        carved = self._carve(needs, gives, effects)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in needs]
        return _Part(CompiledFunction(lambda *values: carved(*values), specs), needs, gives)

    def _number(self, op: tf.Operation) -> int:
        return bisect_right(self._bounds, self._places[op])

    def _is_given(self, tensor: tf.Tensor, number: int) -> bool:
        """Whether a part gets a tensor, instead of computing it: constants and variables it has."""
        if tensor.op.type == "Placeholder":
            return any(tensor is given for given in self._trace.inputs)
        return tensor.op.type != "Const" and self._number(tensor.op) < number


# How far apart sums over a variable may be on two replicas that have the same.
_APART = 1e-6

Array = np.ndarray[Any, Any]


class SharedValues:
    """Combines values that each replica writes and returns into values of the whole batch."""

    def __init__(self, trace: StepTrace, kinds: StepKinds, ranks: Communicator) -> None:
        known = [(v, kinds.state[id(v)]) for v in trace.written if id(v) in kinds.state]
        self._same = [v for v, kind in known if kind == SAME and id(v) not in kinds.drawn]
        self._added = [(v, kind == SUM) for v, kind in known if kind != SAME]
        self._counters = [(v, kinds.drawn[id(v)]) for v in trace.written if id(v) in kinds.drawn]
        self._results = kinds.results
        self._ranks = ranks
        self._before: list[Array] = []
        self._counted: list[Array] = []
        self._checksum = tf.function(self._sums, autograph=False)

    def begin(self) -> None:
        """Notes where the state begins, and lets each replica draw random numbers of its own."""
        self._before = [value_of(variable) for variable, _ in self._added]
        self._counted = [value_of(variable) for variable, _ in self._counters]
        self._count(self._ranks.rank)

    def finish(self, values: Sequence[tf.Tensor], share: float) -> dict[int, Array]:
        """Brings together what one step has made; all replicas must call it."""
        states = [value_of(variable).astype(np.float64) for variable, _ in self._added]
        mine = [
            self._part(state, before, share, is_sum)
            for state, before, (_, is_sum) in zip(states, self._before, self._added, strict=True)
        ]
        shown = [
            self._part(values[i].numpy().astype(np.float64), 0.0, share, kind == SUM)
            for i, kind in self._results.items()
        ]
        checks = np.zeros((self._ranks.size, len(self._same)))
        if self._same:
            checks[self._ranks.rank] = self._checksum().numpy()
        parts = [*mine, *shown, checks]
        flat = np.concatenate([np.zeros(0), *(np.ravel(part) for part in parts)])
        total = self._ranks.start_allreduce(flat, label="state and logs of the step").wait()
        ends = np.cumsum([np.size(part) for part in parts])[:-1]
        found = iter(np.split(total, ends))
        for (variable, is_sum), before in zip(self._added, self._before, strict=True):
            whole = next(found).reshape(before.shape) + (before if is_sum else 0)
            whole = np.rint(whole) if before.dtype.kind in "iub" else whole
            variable.assign(whole.astype(before.dtype))
        logs = {i: np.reshape(next(found), tuple(values[i].shape)) for i in self._results}
        self._check(next(found).reshape(checks.shape))
        self._count(self._ranks.size)
        return logs

    def clear(self) -> None:
        """Goes back to where the last step that did not end began."""
        for (variable, _), before in zip(self._counters, self._counted, strict=False):
            variable.assign(before)

    def _part(self, value: Any, before: Any, share: float, is_sum: bool) -> Any:
        """What this replica adds to a value of the whole batch."""
        if not share:
            return np.zeros_like(value)
        return value - before if is_sum else share * value

    def _count(self, times: int) -> None:
        for (variable, steps), start in zip(self._counters, self._counted, strict=True):
            variable.assign(start + (times * steps).astype(start.dtype))

    def _sums(self) -> tf.Tensor:
        return tf.stack([tf.reduce_sum(tf.cast(v, tf.float64)) for v in self._same])

    def _check(self, everyones: Array) -> None:
        """Compares sums over what must be the same on all replicas."""
        first = everyones[0]
        apart = np.abs(everyones - first) > _APART * np.maximum(np.abs(first), 1.0)
        for variable, differs in zip(self._same, apart.any(axis=0), strict=True):
            if differs:
                raise ReplicaError(
                    f"The step writes '{variable.name}', which is not the same on all replicas any "
                    "more. When the step was tried, before training, it did not follow from the "
                    "samples. Keep what follows from them in metrics, or as a mean or a sum over "
                    "the samples in every step."
                )


class PreparedStep:
    """Runs a step on this replica's share of a batch, and makes of it one of the whole batch."""

    def __init__(
        self,
        trace: StepTrace,
        kinds: StepKinds,
        statistics: BatchStatistics,
        ranks: Communicator,
        gradient_dtype: str | None,
    ) -> None:
        self._trace = trace
        self._ranks = ranks
        self._weighted = kinds.weighted
        self._statistics = statistics
        self._program = StepProgram(trace)
        self._updates = ReplicaUpdates(trace.updates, kinds, ranks, gradient_dtype)
        self._values = SharedValues(trace, kinds, ranks)
        self._metrics = tf.function(self._results_of_metrics, autograph=False)

    def run(self, batch: Batch) -> Any:
        """Runs a training or a test step; all replicas must call it."""
        share = batch.share.counted_rows / batch.rows
        found = self._on_own(batch, share)
        shared = self._values.finish(found, share)
        self._statistics.merge(self._ranks, [each.count for each in batch.shares])
        self._statistics.finish()
        of_metrics = iter(self._metrics())
        values = [
            next(of_metrics) if i in self._trace.metric_logs else shared[i]
            for i in range(len(found))
        ]
        return self._trace.results_with([_plain(value) for value in values])

    def predict(self, batch: Batch) -> Any:
        """Runs a prediction step; as `run`, but puts the samples of all replicas together."""
        share = batch.share.counted_rows / batch.rows
        found = self._on_own(batch, share)
        self._values.finish(found, share)
        rows = [each.counted_rows for each in batch.shares]
        return self._trace.results_with(ReplicaExchange(self._ranks).joined(found, rows))

    def clear(self) -> None:
        """Forgets a step that does not end."""
        self._values.clear()
        self._statistics.clear()

    def _on_own(self, batch: Batch, share: float) -> list[tf.Tensor]:
        self._values.begin()
        if self._weighted:
            self._trace.weight.assign(share)
        tensors = [batch.inputs[i] for i in range(len(batch.inputs))]
        return self._program.run(
            tensors, lambda number, gradients: self._updates.make(number, gradients, share)
        )

    def _results_of_metrics(self) -> list[tf.Tensor]:
        logs = [log for _, log in sorted(self._trace.metric_logs.items())]
        found = {id(log.metric): keras.tree.flatten(log.metric.result()) for log in logs}
        return [tf.convert_to_tensor(found[id(log.metric)][log.position]) for log in logs]


def _plain(value: Any) -> Any:
    """A value of the logs as callbacks of Keras get it."""
    array = value.numpy() if isinstance(value, tf.Tensor) else value
    return array if array.ndim else float(array)


class ReplicaUpdates:
    """Updates weights by the gradients of the whole batch."""

    def __init__(
        self,
        updates: Sequence[Update],
        kinds: StepKinds,
        ranks: Communicator,
        gradient_dtype: str | None,
    ) -> None:
        self._updates = list(updates)
        self._kinds = kinds
        self._buckets: dict[tuple[int, int], list[int]] = {}
        threshold = fusion_threshold_of(None)
        for number, update in enumerate(updates):
            for place, bucket in enumerate(in_buckets(update.variables, threshold)):
                self._buckets[number, place] = bucket
        weights = {
            key: [updates[key[0]].variables[i] for i in bucket]
            for key, bucket in self._buckets.items()
        }
        self._reduction = GradientReduction(ranks, weights, gradient_dtype)
        self._apply = [_compiled(update) for update in updates]

    def make(self, number: int, tensors: Sequence[tf.Tensor], share: float) -> None:
        """Makes an update; all replicas must call it."""
        gradients = self._updates[number].rebuilt(tensors)
        keys = [key for key in self._buckets if key[0] == number]
        for key in keys:
            own = [(i, gradients[i]) for i in self._buckets[key]]
            fixed = [place for place, (i, _) in enumerate(own) if (number, i) in self._kinds.fixed]
            weighted = [self._weighted(number, i, g, share) for i, g in own]
            self._reduction.start(key, weighted, fixed)
        for key in keys:
            found = zip(self._buckets[key], self._reduction.finish(key), strict=True)
            for i, gradient in found:
                gradients[i] = gradient
        self._apply[number](gradients)

    def _weighted(self, number: int, i: int, gradient: Gradient, share: float) -> Gradient:
        """What a replica adds to a gradient of the whole batch."""
        if gradient is None or not share:
            return None
        if self._kinds.gradients[number, i] != MEAN:
            return gradient
        factor = tf.constant(share, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values * factor, gradient.indices, gradient.dense_shape
            )
        return gradient * factor


def _compiled(update: Update) -> Callable[[list[Gradient]], Any]:
    def apply(gradients: list[Gradient]) -> None:
        update.optimizer.apply(gradients, update.variables)

    compiled: Callable[[list[Gradient]], Any] = tf.function(
        apply, autograph=False, reduce_retracing=True
    )
    return compiled
