"""A step of the user's as a TensorFlow graph, and where in it optimizers update weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.custom_steps.distributed_optimizer import averages_gradients
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.training import (
    reported_results,
    scaled_losses_weighted,
    updates_taken,
    variables_for,
)
from tarantella_pp.runtime.stage.side_effects import effects_of

# What is traced: given tensors of a batch, it returns logs or predictions.
Step = Callable[..., Any]


@dataclass(frozen=True)
class Update:
    """A call of an optimizer's `apply`."""

    optimizer: Any  # the optimizer
    variables: list[Any]  # what it is to update
    # For each of them the tensors of its gradient: one, values and indices of slices, or none
    # where there is no gradient
    gradients: list[list[tf.Tensor]]
    place: int  # how many operations there were before

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The tensors of all gradients."""
        return [tensor for parts in self.gradients for tensor in parts]

    def rebuilt(self, tensors: Sequence[Any]) -> list[Any]:
        """Makes gradients of other values in the places of `tensors`."""
        given = iter(tensors)
        found: list[Any] = []
        for parts, variable in zip(self.gradients, self.variables, strict=True):
            values = [next(given) for _ in parts]
            if len(values) == 2:
                shape = tf.constant(list(variable.shape))
                values = [tf.IndexedSlices(*values, dense_shape=shape)]
            found.append(values[0] if values else None)
        return found


@dataclass(frozen=True)
class MetricLog:
    """A value of the logs that is what a metric gives as its result."""

    metric: Any  # the metric
    position: int  # which of the values in its result
    place: int  # how many operations there were when it was asked


class StepTrace:
    """A step, traced for tensors of some shapes.

    Nothing is applied in it: optimizers hand over their gradients, and the step goes on as if the
    weights had been updated. `StepProgram` cuts it there.

    Attributes:
        function: The traced function.
        inputs: The tensors of the batch in its graph.
        updates: The calls of `apply`, in order.
        results: What the step returns, in its own structure, as tensors or `None`.
        metric_logs: By position among `outputs`, what metrics gave.
        weight: What losses that an optimizer scales are multiplied with: 1 unless it is set. The
            gradient of a mean over a share of the batch is larger, in each sample, than that of
            the mean over all of it, and leaves the numbers of float16 sooner.
    """

    def __init__(
        self,
        step: Step,
        specs: Sequence[tf.TensorSpec],
        what: str,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._step = step
        self._what = what
        self._around = around
        self._told: dict[int, tuple[Any, MetricLog]] = {}
        self._traced: Any = None
        self.updates: list[Update] = []
        self.results: Any = None
        self.metric_logs: dict[int, MetricLog] = {}
        self.weight = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        traced = tf.function(self._trace, input_signature=list(specs), autograph=False)
        self.function = traced.get_concrete_function()
        self.inputs = self.function.inputs[: len(specs)]
        self._check_random()
        self.metric_logs = {  # those that were asked after the last change
            i: log
            for i, log in self.metric_logs.items()
            if log.place >= self._last_write(log.metric.variables)
        }

    @property
    def graph(self) -> Any:
        """The traced graph."""
        return self.function.graph

    @property
    def outputs(self) -> list[tf.Tensor]:
        """The tensors among the results."""
        return [leaf for leaf in keras.tree.flatten(self.results) if leaf is not None]

    @functools.cached_property
    def written(self) -> list[tf.Variable]:
        """The variables that the step itself writes, in the order of `variables`."""
        names = {effect.argument for effect in self._effects}
        handles = {id(outer) for outer, inner in self.graph.captures if inner.op.name in names}
        return [variable for variable in self.variables if id(variable.handle) in handles]

    @property
    def is_weighted(self) -> bool:
        """Whether `weight` is in it: whether an optimizer scales a loss."""
        return any(outer is self.weight.handle for outer, _ in self.graph.captures)

    @functools.cached_property
    def variables(self) -> list[tf.Variable]:
        """All variables that the step reads or writes, in the same order on all ranks."""
        every = (v for v in self.graph.variables if v is not self.weight)  # a set
        known = {id(variable.handle): variable for variable in every}
        handles = (id(outer) for outer, _ in self.graph.captures)
        return [known[handle] for handle in handles if handle in known]

    def results_with(self, values: Sequence[Any]) -> Any:
        """The results with other values in the places of `outputs`."""
        given = iter(values)
        leaves = [None if leaf is None else next(given) for leaf in self._leaves]
        return keras.tree.pack_sequence_as(self.results, leaves)

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks: also numbers that were drawn while it was traced."""
        updates = [
            [type(u.optimizer).__name__, *map(_described, u.variables)] for u in self.updates
        ]
        definition = self.graph.as_graph_def()
        bodies = sorted(_digest(body.node_def) for body in definition.library.function)
        whole = hashlib.sha256(b"".join([_digest(definition.node), *bodies]))
        return {
            "updates": updates,
            "variables": [_described(variable) for variable in self.variables],
            "results": [[tensor.dtype.name, tensor.shape.rank] for tensor in self.outputs],
            "operations and constants": whole.hexdigest()[:16],
        }

    @functools.cached_property
    def _effects(self) -> list[Any]:
        return list(effects_of(self.graph.as_graph_def()))

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of `outputs` in the results."""
        found = keras.tree.flatten_with_path(self.results)
        return [".".join(map(str, path)) for path, leaf in found if leaf is not None]

    def _last_write(self, variables: Sequence[Any]) -> int:
        """How many operations there were when the last of some variables had been written."""
        own = {id(variable.value.handle) for variable in variables}
        names = {inner.op.name for outer, inner in self.graph.captures if id(outer) in own}
        writers = {effect.operation for effect in self._effects if effect.argument in names}
        places = enumerate(op.name for op in self.graph.get_operations())
        return max((place + 1 for place, name in places if name in writers), default=0)

    @property
    def _leaves(self) -> list[Any]:
        leaves: list[Any] = keras.tree.flatten(self.results)
        return leaves

    def _trace(self, *tensors: tf.Tensor) -> None:
        self.updates, self._told = [], {}
        self._traced = tf.compat.v1.get_default_graph()
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(self._around())
            hooks.enter_context(updates_taken(self._take))
            hooks.enter_context(reported_results(self._tell))
            hooks.enter_context(scaled_losses_weighted(self._weighted))
            results = self._step(*tensors)
        flat = keras.tree.flatten(results)
        found = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in flat]
        known = enumerate(id(leaf) for leaf in flat if leaf is not None)
        self.metric_logs = {i: self._told[key][1] for i, key in known if key in self._told}
        self.results = keras.tree.pack_sequence_as(results, found)

    def _take(self, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
        if averages_gradients(optimizer):
            raise UnsupportedModelError(
                f"Optimizer '{optimizer.name}' is a tnt.DistributedOptimizer, and tnt.Model adds "
                "up the gradients of all replicas itself. Compile the model with the optimizer "
                "as it is."
            )
        gradients = list(grads)
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._traced:
            raise UnsupportedModelError(
                f"{self._what} applies gradients of optimizer '{optimizer.name}' within a "
                "condition, a loop or a `tf.function` of its own, where the gradients of all "
                "replicas cannot be added up. Call `apply` in the step itself, which is compiled "
                "anyway, and choose what to apply with `tf.where`."
            )
        with tf.init_scope():
            variables = variables_for(optimizer, trainable_variables)
        if len(variables) != len(gradients):
            raise UnsupportedModelError(
                f"{self._what} applies {len(gradients)} gradients to {len(variables)} variables of "
                f"optimizer '{optimizer.name}'. Pass one for each, `None` where there is none."
            )
        parts = [_parts(gradient) for gradient in gradients]
        self.updates.append(Update(optimizer, variables, parts, len(graph.get_operations())))

    def _tell(self, metric: Any, value: Any) -> None:
        if tf.executing_eagerly():
            return
        place = len(tf.compat.v1.get_default_graph().get_operations())
        for position, leaf in enumerate(keras.tree.flatten(value)):
            self._told[id(leaf)] = leaf, MetricLog(metric, position, place)

    def _weighted(self, loss: Any) -> tf.Tensor:
        loss = tf.convert_to_tensor(loss)
        return loss * tf.cast(self.weight, loss.dtype)

    def _check_random(self) -> None:
        """Refuses random numbers that would be the same on all replicas, whatever seeds say."""
        drawn = [effect.operation for effect in self._effects if effect.argument is None]
        if drawn:
            raise UnsupportedModelError(
                f"{self._what} draws random numbers of TensorFlow's own generator (operation "
                f"'{drawn[0]}'), of which replicas may draw the same ones for other samples. Make "
                "a generator in the model's __init__, self.seed_generator = "
                "keras.random.SeedGenerator(seed), and pass it on, "
                "keras.random.normal(shape, seed=self.seed_generator)."
            )


def _digest(nodes: Iterable[Any]) -> bytes:
    """What operations of a graph do; names of branches and of other functions differ by rank."""
    found = hashlib.sha256()
    for node in nodes:
        value = node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b""
        found.update(node.op.encode() + value)
    return found.digest()


def _parts(gradient: Any) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def _described(variable: Any) -> str:
    return f"{tf.as_dtype(variable.dtype).name}{[*variable.shape]}"
