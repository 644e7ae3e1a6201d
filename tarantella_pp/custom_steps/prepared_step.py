"""A step of the user's that is ready to be run on shares of batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.custom_loops import GradientExchange
from tarantella_pp.custom_steps.step_probe import StepKinds
from tarantella_pp.custom_steps.step_trace import StepTrace, Update
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.optimizers import scaled
from tarantella_pp.runtime.batch import Batch
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.process_groups import ReplicaExchange
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.probes.parts import MEAN, SAME, SUM
from tarantella_pp.runtime.stage.forward_state import BatchStatistics
from tarantella_pp.runtime.stage.graph_functions import (
    CompiledFunction,
    CompiledUpdate,
    SubgraphExtractor,
    frontier,
)
from tarantella_pp.runtime.stage.graph_split import has_effect
from tarantella_pp.runtime.weights.slices import Gradient


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
        wanted = [*(list(update.gradients.tensors) for update in trace.updates), trace.outputs]
        # From the last to the first, for each says what it needs of earlier ones.
        found = [self._part(number, wanted) for number in reversed(range(len(wanted)))]
        self._parts = found[::-1]

    def run(
        self, tensors: Sequence[tf.Tensor], update: Callable[[int, list[tf.Tensor]], None]
    ) -> list[tf.Tensor]:
        """Runs the step."""
        known = {t.ref(): value for t, value in zip(self._trace.inputs, tensors, strict=True)}
        for number, part in enumerate(self._parts):
            values = part.call(*(known[tensor.ref()] for tensor in part.needs))
            known |= {t.ref(): value for t, value in zip(part.gives, values, strict=True)}
            if number < len(self._bounds):
                wanted = self._trace.updates[number].gradients.tensors
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
        return _Part(CompiledFunction(carved, specs), needs, gives)

    def _number(self, op: tf.Operation) -> int:
        return bisect_right(self._bounds, self._places[op])

    def _is_given(self, tensor: tf.Tensor, number: int) -> bool:
        """Whether a part gets a tensor, instead of computing it: constants and variables it has."""
        if tensor.op.type == "Placeholder":
            return any(tensor is given for given in self._trace.inputs)
        return tensor.op.type != "Const" and self._number(tensor.op) < number


Array = np.ndarray[Any, Any]


class SharedValues:
    """Combines values that each replica writes and returns into values of the whole batch."""

    def __init__(
        self, written: Sequence[tf.Variable], kinds: StepKinds, ranks: Communicator
    ) -> None:
        self._drawn = [
            (written[i], np.reshape(steps, tuple(written[i].shape))) for i, steps in kinds.drawn
        ]
        pairs = zip(written, kinds.state, strict=True)
        self._added = [(variable, kind) for variable, kind in pairs if kind != SAME]
        self._results = kinds.results
        self._ranks = ranks
        self._before: list[Array] = []
        self._counted: list[Array] = []

    def begin(self) -> None:
        """Notes where the state begins, and lets each replica draw random numbers of its own."""
        self._before = [value_of(variable) for variable, _ in self._added]
        self._counted = [value_of(variable) for variable, _ in self._drawn]
        self._count(self._ranks.rank)

    def finish(self, results: Sequence[tf.Tensor], share: float) -> list[Array]:
        """Brings together what one step has made; all replicas must call it."""
        kinds = [*(kind for _, kind in self._added), *self._results]
        values = [value_of(variable) for variable, _ in self._added]
        values += [value.numpy() for value, _ in zip(results, self._results, strict=False)]
        before = [*self._before, *np.zeros(len(self._results))]
        mine = [
            _part(value, start, share, kind)
            for value, start, kind in zip(values, before, kinds, strict=True)
        ]
        flat = np.concatenate([np.zeros(0), *map(np.ravel, mine)])
        total = self._ranks.start_allreduce(flat, label="state and logs of the step").wait()
        pieces = np.split(total, np.cumsum([part.size for part in mine]))
        found = [piece.reshape(part.shape) for piece, part in zip(pieces, mine, strict=False)]
        for (variable, kind), start, whole in zip(self._added, self._before, found, strict=False):
            whole = whole + start if kind == SUM else whole
            whole = np.rint(whole) if start.dtype.kind in "iub" else whole
            variable.assign(whole.astype(start.dtype))
        self._count(self._ranks.size)
        return found[len(self._added) :]

    def clear(self) -> None:
        """Goes back to where the last step that did not end began."""
        for (variable, _), before in zip(self._drawn, self._counted, strict=False):
            variable.assign(before)

    def _count(self, times: int) -> None:
        for (variable, steps), start in zip(self._drawn, self._counted, strict=True):
            variable.assign(start + (times * steps).astype(start.dtype))


def _part(value: Any, before: Any, share: float, kind: str) -> Array:
    """What a replica adds to a value of the whole batch."""
    found: Array = np.asarray(value, np.float64)
    if not share:
        return np.zeros_like(found)
    return found - before if kind == SUM else share * found


class PreparedStep:
    """Runs a step on this replica's share of a batch, and makes of it one of the whole batch."""

    def __init__(
        self,
        trace: StepTrace,
        written: Sequence[tf.Variable],
        kinds: StepKinds,
        statistics: BatchStatistics,
        ranks: Communicator,
        gradient_dtype: str | None,
    ) -> None:
        self.optimizers = [update.optimizer for update in trace.updates]
        self.changes = [*written, *(v.value for u in trace.updates for v in u.variables)]
        self._trace = trace
        self._kinds = kinds
        self._replicas = ReplicaExchange(ranks)
        self._statistics = statistics
        self._program = StepProgram(trace)
        self._exchanges = [
            GradientExchange(update.variables, ranks, gradient_dtype) for update in trace.updates
        ]
        self._apply = [_compiled(update) for update in trace.updates]
        self._values = SharedValues(written, kinds, ranks)
        of_variables = [trace.outputs[i] for i in trace.of_variables]
        read = SubgraphExtractor(trace.function).extract([], of_variables)
        self._read = CompiledFunction(read, [])

    def run(self, batch: Batch) -> Any:
        """Runs a training or a test step; all replicas must call it."""
        found, share = self._on_own(batch)
        values: list[Any] = list(self._values.finish(found, share))
        self._take_statistics(batch)
        for i, value in zip(self._trace.of_variables, self._read(), strict=True):
            values[i] = value.numpy()
        logs = [value if value.ndim else float(value) for value in values]
        return self._trace.results_with(logs)

    def predict(self, batch: Batch) -> Any:
        """Runs a prediction step; as `run`, but puts the samples of all replicas together."""
        found, share = self._on_own(batch)
        self._values.finish(found, share)
        rows = [each.counted_rows for each in batch.shares]
        return self._trace.results_with(self._replicas.joined(found, rows))

    def clear(self) -> None:
        """Forgets a step that does not end."""
        self._values.clear()
        self._statistics.clear()

    def _on_own(self, batch: Batch) -> tuple[list[tf.Tensor], float]:
        """What the step makes of this replica's samples, and their share of the batch."""
        share = batch.share.counted_rows / batch.rows
        self._values.begin()

        def update(number: int, tensors: list[tf.Tensor]) -> None:
            if not self._statistics.waits:
                self._take_statistics(batch)
            gradients = self._trace.updates[number].rebuilt(tensors, self._kinds.fixed[number])
            mine = [
                None if not share else scaled(gradient, share) if kind == MEAN else gradient
                for gradient, kind in zip(gradients, self._kinds.gradients[number], strict=True)
            ]
            self._apply[number](self._exchanges[number].added_up(mine))

        return self._program.run([*batch.inputs.values()], update), share

    def _take_statistics(self, batch: Batch) -> None:
        """Brings moving averages up to date, as far as the step has come."""
        everywhere = self._replicas.values_of_all(self._statistics.variables)
        self._statistics.merge(everywhere, [each.count for each in batch.shares])
        self._statistics.finish()


def _compiled(update: Update) -> CompiledUpdate:
    def apply(gradients: list[Gradient]) -> None:
        if update.method == "apply":
            update.optimizer.apply(gradients, update.variables)
        else:
            update.optimizer.apply_gradients(zip(gradients, update.variables, strict=True))

    return CompiledUpdate(apply)
