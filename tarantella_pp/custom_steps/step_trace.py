"""A step of the user's as a TensorFlow graph, and where in it optimizers update weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.custom_steps.custom_loops import averages_gradients
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.training import updates_taken, variables_for
from tarantella_pp.runtime.comm.collective import digest
from tarantella_pp.runtime.probes.constants import constants_of
from tarantella_pp.runtime.probes.linearity import following, nonlinear_write
from tarantella_pp.runtime.stage.graph_functions import FlatGradients, frontier
from tarantella_pp.runtime.stage.graph_split import has_effect
from tarantella_pp.runtime.stage.side_effects import effects_of, read_late
from tarantella_pp.runtime.weights.slices import put_together


@dataclass(frozen=True)
class Update:
    """A call of an optimizer's `apply` or `apply_gradients`."""

    optimizer: Any  # the optimizer
    variables: list[Any]  # what it is to update
    gradients: FlatGradients  # one for each of them
    dense: list[tf.Tensor | None]  # the same gradients, slices added up
    place: int  # how many operations there were before
    method: str  # which of the two

    def rebuilt(self, tensors: Sequence[Any], fixed: Mapping[int, Sequence[bool]]) -> list[Any]:
        """Makes gradients of other values in the places of `gradients`."""
        pairs = zip(self.gradients.rebuilt(tensors), self.variables, strict=True)
        return [
            put_together([g], fixed[i], v) if isinstance(g, tuple) else g
            for i, (g, v) in enumerate(pairs)
        ]


class StepTrace:
    """A step, traced as if weights were updated where optimizers hand over their gradients."""

    def __init__(
        self,
        step: Callable[..., Any],  # given tensors of a batch, it returns logs or predictions
        specs: Sequence[tf.TensorSpec],
        what: str,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._step = step
        self.what = what
        self._around = around
        self._traced: Any = None
        self._moments: Any = None  # of batch normalizations, if they are known
        self.updates: list[Update] = []  # in order
        self.results: Any = None  # in the structure that the step returns, tensors or `None`
        traced = tf.function(self._trace, input_signature=list(specs), autograph=False)
        self.function = traced.get_concrete_function()
        self.graph = self.function.graph
        self.inputs = self.function.inputs[: len(specs)]
        self._check_random()

    @property
    def outputs(self) -> list[tf.Tensor]:
        """The tensors among the results."""
        return [leaf for leaf in keras.tree.flatten(self.results) if leaf is not None]

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of `outputs` in the results."""
        found = keras.tree.flatten_with_path(self.results)
        return [".".join(map(str, path)) for path, leaf in found if leaf is not None]

    @functools.cached_property
    def written(self) -> list[tf.Variable]:
        """The variables that the step itself writes, in the order of `variables`."""
        names = {effect.argument for effect in self._effects}
        return [variable for variable in self.variables if self._name(variable) in names]

    @functools.cached_property
    def variables(self) -> list[tf.Variable]:
        """All variables that the step reads or writes, in the same order on all ranks."""
        known = {id(variable.handle): variable for variable in self.graph.variables}  # of a set
        return [known[handle] for handle in self._captured if handle in known]

    @functools.cached_property
    def _captured(self) -> dict[int, str]:
        """Names of the placeholders of what the graph captures, by `id`."""
        return {id(outer): inner.op.name for outer, inner in self.graph.captures}

    def _name(self, variable: Any) -> str:
        """The name of the placeholder of a variable in the graph; none if it is not there."""
        return self._captured.get(id(variable.handle), "")

    @functools.cached_property
    def of_samples(self) -> set[Any]:
        """The operations whose results follow from what samples contain."""
        return following(self.graph, self.inputs)

    def written_with(self, variable: tf.Variable) -> tuple[bool, bool]:
        """Whether a variable is written with what follows from samples, and not linearly."""
        name, operation = self._name(variable), self.graph.get_operation_by_name
        writes = {effect.operation for effect in self._effects if effect.argument == name}
        bends = any(nonlinear_write(operation(write), self.of_samples) for write in writes)
        return operation(name) in self.of_samples, bends

    @functools.cached_property
    def of_variables(self) -> list[int]:
        """The results that follow from variables as the step leaves them, such as metrics'."""
        places = {op: place for place, op in enumerate(self.graph.get_operations())}
        ends = self._last_writes(places)

        def is_final(tensor: tf.Tensor) -> bool:
            given, run = frontier([tensor], lambda t: t.op.type == "Placeholder")
            if any(tensor is of_batch for tensor in given for of_batch in self.inputs):
                return False
            reads = [(op, source.op.name) for op in run for source in op.inputs]
            late = all(places[op] >= ends.get(name, 0) for op, name in reads)
            return late and not any(map(has_effect, run))

        return [i for i, tensor in enumerate(self.outputs) if is_final(tensor)]

    def _last_writes(self, places: dict[tf.Operation, int]) -> dict[str, int]:
        """How many operations there were when each captured variable had been written last."""
        by_name = {op.name: place for op, place in places.items()}
        writes = [(effect.argument, by_name[effect.operation] + 1) for effect in self._effects]
        for update in self.updates:
            for variable in [*update.variables, *update.optimizer.variables]:
                own = variable.value if isinstance(variable, keras.Variable) else variable
                writes.append((self._name(own), update.place))
        ends: dict[str, int] = {}
        for name, place in writes:
            if name:
                ends[name] = max(place, ends.get(name, 0))
        return ends

    def read_late(self, bounds: Container[int] = ()) -> Any | None:
        """A moving average that something follows from once the step has written it.

        `bounds` are places in the step at which all of them are brought up to date.
        """
        moments = self._moments or ()
        own = {self._name(average.value) for average, _ in moments} - {""}
        stops = {tensor.ref() for _, tensor in moments}
        results = [t for i, t in enumerate(self.outputs) if i not in self.of_variables]
        results += [tensor for update in self.updates for tensor in update.gradients.tensors]
        for effect in self._effects if moments else ():
            given = self.graph.get_operation_by_name(effect.operation).inputs
            if effect.argument in own:
                # A normalization reads what it writes itself, in the same way as it is merged.
                _, above = frontier(given[1:], lambda tensor: tensor.ref() in stops)
                if {op.name for op in above}.isdisjoint(own - {effect.argument}):
                    continue
            results += given
        return read_late(self.function, moments, results, bounds)

    def results_with(self, values: Sequence[Any]) -> Any:
        """The results with other values in the places of `outputs`."""
        given = iter(values)
        leaves = keras.tree.flatten(self.results)
        filled = [None if leaf is None else next(given) for leaf in leaves]
        return keras.tree.pack_sequence_as(self.results, filled)

    def digest(self) -> str:
        """What must be the same on all ranks: also numbers that were drawn while it was traced."""
        return digest(number for _, number in constants_of(self.function))

    @functools.cached_property
    def _effects(self) -> list[Any]:
        return list(effects_of(self.graph.as_graph_def()))

    def _trace(self, *tensors: tf.Tensor) -> None:
        self.updates = []
        self._traced = tf.compat.v1.get_default_graph()
        with self._around() as self._moments, updates_taken(self._take):
            results = self._step(*tensors)
        self.results = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), results
        )

    def _take(self, optimizer: Any, grads: Any, trainable_variables: Any, method: str) -> None:
        gradients, graph = list(grads), tf.compat.v1.get_default_graph()
        if averages_gradients(optimizer):
            raise UnsupportedModelError(
                f"Optimizer '{optimizer.name}' is a tnt.DistributedOptimizer, and tnt.Model adds "
                "up the gradients of all replicas itself. Compile the model with the optimizer "
                "as it is."
            )
        if graph is not self._traced:
            raise UnsupportedModelError(
                f"{self.what} applies gradients of optimizer '{optimizer.name}' within a "
                "condition, a loop or a `tf.function` of its own, where the gradients of all "
                "replicas cannot be added up. Call `apply` in the step itself, and choose what to "
                "apply with `tf.where`."
            )
        with tf.init_scope():
            variables = variables_for(optimizer, trainable_variables)
        if len(variables) != len(gradients):
            raise UnsupportedModelError(
                f"{self.what} applies {len(gradients)} gradients to {len(variables)} variables of "
                f"optimizer '{optimizer.name}'. Pass one for each, `None` where there is none."
            )
        place = len(graph.get_operations())
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        flat = FlatGradients(gradients)
        self.updates.append(Update(optimizer, variables, flat, dense, place, method))

    def _check_random(self) -> None:
        """Refuses random numbers that would be the same on all replicas, whatever seeds say."""
        if drawn := [effect.operation for effect in self._effects if effect.argument is None]:
            raise UnsupportedModelError(
                f"{self.what} draws random numbers of TensorFlow's own generator (operation "
                f"'{drawn[0]}'), of which replicas may draw the same ones for other samples. Make "
                "a generator in the model's __init__, self.seed_generator = "
                "keras.random.SeedGenerator(seed), and pass it on, "
                "keras.random.normal(shape, seed=self.seed_generator)."
            )
