"""Reads a Keras model into a layer graph: nested models opened, one node for every call."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import keras

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.functional import (
    build_late,
    get_mask,
    input_layer_of,
    inputs_struct,
    is_plain_call,
    network_around,
    network_of,
    ordered_nodes,
    outputs_struct,
    reads_variables,
    runs_its_graph,
    states_of,
    sublayers,
    takes_training,
    trained_variables,
    tree,
)
from tarantella_pp.partition.graph.calls import (
    Call,
    OpenedCall,
    PlaceInside,
    graph_of,
)
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Tensor
from tarantella_pp.partition.graph.layer_inside import (
    LargestPart,
    LayerInside,
    LayerTrace,
    OpenedLayer,
    Path,
    SeenTensor,
    Value,
    is_composite,
    name_of,
)
from tarantella_pp.partition.graph.placeholders import (
    Probe,
    made_specs,
    mask_flow,
    probe_call,
    probe_of,
    rows_per_sample,
    sample_axis,
    symbolic,
)
from tarantella_pp.partition.graph.traced_costs import NodeCost
from tarantella_pp.partition.graph.units import Shape

__all__ = ["Call", "ExtractedModel", "extract"]

_REMEDY = "Build it with keras.Model(inputs, outputs) or keras.Sequential([keras.Input(...), ...])."


@dataclass(frozen=True, slots=True)
class ExtractedModel:
    """A model's graph, and all that running its nodes needs."""

    model: Any  # the model it was read from; nothing in it was changed or copied
    graph: LayerGraph  # the layer graph
    calls: tuple[Call, ...]  # one call per node of the graph, in the same order
    variables: tuple[Any, ...]  # the Keras variable of each `graph.weights`, in the same order
    # The model's symbolic inputs in its own structure; flattened with `keras.tree` they are
    # `graph.inputs`
    inputs_struct: Any
    outputs_struct: Any  # likewise for `graph.outputs`
    reader: _Reader  # what read it

    @property
    def kept_whole(self) -> dict[str, str]:
        """Layers with layers inside that cannot be opened, by name, and why."""
        return {k: v for each in self.reader.insides for k, v in each.why_whole.items()}

    def planned_by(self, fingerprint: str, names: Iterable[str]) -> ExtractedModel:
        """The model with those layers opened that a plan takes for opened; itself if unknown.

        What exceeds a level depends on what is trained, and so it may be told by names of nodes.
        """
        steps = [name.split("/") for name in names if self.reader.insides]
        around = frozenset("/".join(s[:i]) for s in steps for i in range(1, len(s)))
        limits = [LargestPart(but=around)] if around else []
        before = [self, *self.reader.readings.values()]
        readings = itertools.chain(
            before, map(self._opened, limits), map(self.at_level, self.levels)
        )
        return next((each for each in readings if each.graph.fingerprint() == fingerprint), self)

    @property
    def levels(self) -> range:
        """How far layers may be opened; see `at_level`."""
        return range(1, _FINEST) if self.reader.insides else range(0)

    def at_level(self, level: int) -> ExtractedModel:
        """Reads the model once more, with layers opened that have layers inside.

        Those are opened that make up more than `1 / 2 ** level` of the whole, again and again.
        """
        if not level:
            return self
        if level in self.reader.readings:
            return self.reader.readings[level]
        graph, share = self.reader.whole, 0.5**level
        limits = LargestPart(
            share * sum(node.flops for node in graph.nodes),
            share * sum(weight.bytes for weight in graph.weights if weight.trainable),
            share * sum(node.residual_bytes for node in graph.nodes),
        )
        found = self.reader.readings[level] = self._opened(limits)
        return found

    def _opened(self, limits: LargestPart) -> ExtractedModel:
        return _read(self.model, _Reader(self.reader.assumed_size, self.reader, limits))


# More levels than any model needs.
_FINEST = 13


def extract(model: keras.Model | ExtractedModel, *, assumed_size: int = 256) -> ExtractedModel:
    """Reads a model's operations into a graph, without changing the model.

    Nested Functional and Sequential models are opened, as often as they are called, down to
    layers and `keras.ops` calls. A nested model stays one node where opening it could change a
    result: it overrides `call()`, has an activity regularizer, converts its inputs, or gets a
    mask of its own.
    """
    if isinstance(model, ExtractedModel):
        return model
    return _read(model, _Reader(assumed_size))


def _read(model: Any, reader: _Reader) -> ExtractedModel:
    network = _supported_network(model)
    build_late(model, inputs_struct(network))
    reader.owned = {id(variable) for variable in model.variables}
    reader.knows_no_training = not takes_training(model)
    env: dict[int, int] = {}
    for tensor in network.inputs:
        _check_input(tensor)
        shape = tuple(tensor.shape)
        env[id(tensor)] = reader.add_tensor(tensor.name, shape, tensor.dtype, probe_of(shape))
    reader.read(network, env, prefix="")
    inputs = tuple(env[id(tensor)] for tensor in network.inputs)
    outputs = tuple(env[id(tensor)] for tensor in network.outputs)
    if passed_on := [reader.tensors[i].name for i in outputs if i in inputs]:
        raise UnsupportedModelError(
            f"Outputs {passed_on} of model '{model.name}' are its inputs as they are, so no stage "
            "computes them. Leave them out of the outputs."
        )
    found = {id(v): v for call in reader.calls for v in call.variables}
    # As in a model with nothing opened, so that files of a run know them by their places
    variables = tuple({v: found[v] for v in (*reader.order, *found) if v in found}.values())
    graph = graph_of(
        reader.tensors,
        reader.calls,
        variables,
        reader.states(),
        inputs=inputs,
        outputs=outputs,
        assumed_size=reader.assumed_size,
    )
    if reader.limits is None:
        reader.whole, reader.order = graph, tuple(found)
    return ExtractedModel(
        model=model,
        graph=graph,
        calls=tuple(reader.calls),
        variables=variables,
        inputs_struct=inputs_struct(network),
        outputs_struct=outputs_struct(network),
        reader=reader,
    )


class _Reader:
    """Walks through a model and the models in it, in the order in which Keras runs them.

    An `env` maps `id` of the symbolic tensors of one model, in one call of it, to tensor ids.
    """

    def __init__(
        self, assumed_size: int, before: _Reader | None = None, limits: LargestPart | None = None
    ) -> None:
        """A reader opens what is larger than the limits, as it was looked into `before`."""
        self.assumed_size, self.limits = assumed_size, limits
        self.readings: dict[int, ExtractedModel] = {}  # by level
        self.owned: set[int] = set()  # `id` of the model's variables
        self.knows_no_training = False
        self.whole: Any = None if before is None else before.whole
        # Its variables, by `id`
        self.order: tuple[int, ...] = () if before is None else before.order
        self._before = None if before is None else list(before.insides)
        self.insides: list[LayerInside] = []  # of layers with layers inside
        self.tensors: list[Tensor] = []  # an id is a position
        # The shapes of each for two numbers of samples; `None` where they cannot be told
        self._probes: list[Probe] = []
        self.calls: list[Call] = []
        self._unmasked: set[int] = set()  # ids of the tensors whose masks a call has deleted
        self._names: Counter[str] = Counter()

    def add_tensor(
        self, name: str, shape: Shape, dtype: str, probe: Probe, mask_shape: Shape | None = None
    ) -> int:
        """Adds a tensor and returns its id."""
        tensor = Tensor(
            id=len(self.tensors),
            name=name,
            shape=shape,
            dtype=dtype,
            mask_shape=mask_shape,
            rows_per_sample=rows_per_sample(probe),
            sample_axis=sample_axis(probe),
        )
        self.tensors.append(tensor)
        self._probes.append(probe)
        return tensor.id

    def _unique_name(self, path: str) -> str:
        """Returns the path itself the first time, then `"path:1"`, `"path:2"` and so on."""
        name = path
        while self._names[name]:
            name = f"{path}:{self._names[path]}"
            self._names[path] += 1
        self._names[name] += 1
        return name

    def read(self, network: Any, env: dict[int, int], prefix: str) -> None:
        """Adds all calls of a Functional, and puts the tensors they make into `env`."""
        for node in ordered_nodes(network):
            if node.is_input or any(id(tensor) not in env for tensor in node.input_tensors):
                continue  # as Keras does: not computable from these inputs, so not needed
            given = [self.tensors[env[id(tensor)]] for tensor in node.input_tensors]
            inner_inputs = _opened_inputs(node, given)
            if inner_inputs is None:
                self._add_call(node, env, prefix + node.operation.name)
                continue
            inner = network_of(node.operation)
            inner_env = {
                id(inner_tensor): env[id(tensor)]
                for inner_tensor, tensor in zip(inner.inputs, inner_inputs, strict=True)
            }
            self.read(inner, inner_env, f"{prefix}{node.operation.name}/")
            for tensor, inner_tensor in zip(node.outputs, inner.outputs, strict=True):
                env[id(tensor)] = inner_env[id(inner_tensor)]

    def _add_call(self, node: Any, env: dict[int, int], path: str) -> None:
        _check_operation(node.operation)
        bindings = {id(tensor): env[id(tensor)] for tensor in node.input_tensors}
        unmasked = self._unmasked & set(bindings.values())
        inside = self._inside(node, bindings) if is_composite(node.operation) else None
        if inside is not None and self.limits is not None:
            opened = inside.opened(self.limits, path)
            if opened is not None:
                parts = self._add_parts(node, opened, bindings, unmasked, path)
                self._unmasked.update(bindings[key] for key in inside.unmasked)
                env.update(zip(map(id, node.outputs), parts, strict=True))
                return
        name = self._unique_name(path)
        free = {key: self._symbolic(t) for key, t in bindings.items()}
        args, kwargs = node.arguments.fill_in(free)
        shapes, dtypes = zip(*_specs(node, free), strict=True)
        seen = None if inside is None else inside.results()
        if inside is not None and seen is not None and len(seen) == len(shapes):
            probes = [tensor.probe for tensor in seen]
            masks = tuple(tensor.mask_shape for tensor in seen)
            dtypes = tuple(tensor.dtype for tensor in seen)
            self._unmasked.update(bindings[key] for key in inside.unmasked)
        else:
            known = {key: (self._probes[t], self.tensors[t].dtype) for key, t in bindings.items()}
            probes = probe_call(node, known, list(shapes))
            flow = mask_flow(node.operation, args, dict(kwargs), len(shapes))
            self._unmasked.update(bindings[key] for key, t in free.items() if id(t) in flow.removed)
            masks = flow.outputs
            dtypes = flow.dtypes if len(flow.dtypes) == len(dtypes) else dtypes
        outputs = []
        sampled = any(self.tensors[t].shape[:1] == (None,) for t in bindings.values())
        for i, (tensor, said) in enumerate(zip(node.outputs, shapes, strict=True)):
            any_number = sampled and said[:1] == (1,) and rows_per_sample(probes[i]) == 1
            shape = (None, *said[1:]) if any_number else said
            label = name if len(shapes) == 1 else f"{name}[{i}]"
            _check_result(tensor, node, label)
            made = self.add_tensor(label, shape, dtypes[i], probes[i], masks[i])
            outputs.append(made)
            env[id(tensor)] = made
        variables = tuple(states_of(node.operation, node.arguments))
        self.calls.append(
            Call(
                name=name,
                operation=node.operation,
                arguments=node.arguments,
                bindings=bindings,
                outputs=tuple(outputs),
                variables=variables,
                unmasked=self._without_masks(unmasked),
                knows_no_training=self.knows_no_training,
                cost=self._cost_inside(inside, bindings, outputs),
            )
        )

    def _without_masks(self, tensors: set[int]) -> frozenset[int]:
        return frozenset(t for t in tensors if self.tensors[t].mask_shape is not None)

    def _inside(self, node: Any, bindings: dict[int, int]) -> LayerInside:
        """Looks into a layer, once."""
        if self._before:
            inside = self._before.pop(0)
        else:
            given = {
                key: SeenTensor(
                    self.tensors[t].shape,
                    self.tensors[t].dtype,
                    None if t in self._unmasked else self.tensors[t].mask_shape,
                    self._probes[t],
                )
                for key, t in bindings.items()
            }
            how = (None, None) if self.knows_no_training else (True, False)
            inside = LayerInside(node.operation, node.arguments, given, how)
        self.insides.append(inside)
        return inside

    @staticmethod
    def _cost_inside(
        inside: LayerInside | None, bindings: dict[int, int], outputs: Sequence[int]
    ) -> NodeCost | None:
        cost = None if inside is None else inside.cost()
        if cost is None:
            return None
        return _cost(cost, lambda v: bindings[v.place] if v.path is None else outputs[v.place])

    def _add_parts(
        self,
        node: Any,
        opened: OpenedLayer,
        bindings: dict[int, int],
        unmasked: set[int],
        path: str,
    ) -> tuple[int, ...]:
        """Adds the parts of an opened layer as nodes; returns what it makes."""
        made: dict[Path, tuple[int, ...]] = {}
        whole = OpenedCall(node.operation, opened, made, self.tensors)

        def tensor_of(value: Value) -> int:
            if value.path is None:
                return bindings[value.place]
            if value.path not in made:
                made[value.path] = tuple(map(tensor_of, opened.aliases[value.path]))
            return made[value.path][value.place]

        for part in opened.parts:
            name = self._unique_name(path + name_of(opened.calls, part.part.path))
            outputs = []
            for i, tensor in enumerate(part.makes):
                label = name if len(part.makes) == 1 else f"{name}[{i}]"
                outputs.append(
                    self.add_tensor(
                        label, tensor.shape, tensor.dtype, tensor.probe, tensor.mask_shape
                    )
                )
            made[part.part.path] = tuple(outputs)
            operation = Rest(part.layer.name) if part.part.is_rest else part.layer
            own = () if part.part.is_rest else states_of(part.layer)
            variables = {id(v): v for v in (*own, *part.variables)}
            self.calls.append(
                Call(
                    name=name,
                    operation=operation,
                    arguments=node.arguments,
                    bindings=bindings,
                    outputs=tuple(outputs),
                    variables=tuple(variables.values()),
                    unmasked=self._without_masks(unmasked),
                    knows_no_training=self.knows_no_training,
                    cost=_cost(part.cost, tensor_of),
                    place=PlaceInside(
                        whole,
                        part.part.path,
                        part.layer,
                        tuple(map(tensor_of, part.values)),
                        frozenset(map(tensor_of, part.needs)),
                        tuple(v for v in part.variables if id(v) in self.owned),
                    ),
                )
            )
        for inner, values in opened.aliases.items():
            made.setdefault(inner, tuple(map(tensor_of, values)))
        return made[()]

    def states(self) -> set[int]:
        """Variables, by `id`, that calls change, and not optimizers alone.

        All that no optimizer may train, but constants that several calls share: these are tried.
        """
        trained = {id(v) for call in self.calls for v in trained_variables(call.operation)}
        # What only the code between layers reads nothing writes; metrics are a layer's as well.
        held = {id(v) for call in self.calls for v in states_of(call.operation)} - trained
        users = Counter(id(v) for call in self.calls for v in call.variables if id(v) in held)
        shared = {key for key, count in users.items() if count > 1}
        sharing = {
            id(call.arguments): call
            for call in self.calls
            if any(id(variable) in shared for variable in call.variables)
        }
        return (held - shared).union(*(shared & self._written(c) for c in sharing.values()))

    def _written(self, call: Call) -> set[int]:
        """The variables that a call may change, whatever is frozen now."""
        operation = call.operation if call.place is None else call.place.whole.operation
        free = {key: self._symbolic(t) for key, t in call.bindings.items()}
        try:
            with mock.patch.object(keras.layers.Layer, "trainable", new=True):
                both = [LayerTrace(operation, call.arguments, free, how) for how in (True, False)]
        except Exception:  # whatever the user's code does not like about it
            return {id(variable) for variable in states_of(operation)}
        return both[0].written | both[1].written

    def _symbolic(self, t: int) -> Any:
        tensor = self.tensors[t]
        mask_shape = None if t in self._unmasked else tensor.mask_shape
        return symbolic(tensor.shape, tensor.dtype, mask_shape)


def _cost(cost: NodeCost, tensor_of: Callable[[Value], int]) -> NodeCost:
    return replace(cost, keeps=tuple(dict.fromkeys(map(tensor_of, cost.keeps))))


class Rest(keras.Operation):
    """What a layer computes besides the calls of those in it."""


def _specs(node: Any, free: dict[int, Any]) -> list[tuple[Shape, str]]:
    """Returns the shapes and dtypes that a call makes from these tensors.

    They differ from those in the node where a nested model is called on others than those it was
    built with. Of a nested model that stays closed Keras only guesses them.
    """
    pairs = [(t, free[id(t)]) for t in node.input_tensors]
    same = all((*t.shape, t.dtype) == (*given.shape, given.dtype) for t, given in pairs)
    if same and network_of(node.operation) is None:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in node.outputs]
    return made_specs(node, free)


def _opened_inputs(node: Any, given: list[Tensor]) -> list[Any] | None:
    """Says how to open a call of a nested model."""
    model = node.operation
    network = network_of(model)
    if network is None or not is_plain_call(model) or not _same_weights_inside(model, network):
        return None
    args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
    kwargs.pop("training", None)  # the run's own `training` goes before it, as in Keras
    mask = kwargs.pop("mask", None)
    values = list(args) + [kwargs.pop(key) for key in ("inputs",) if key in kwargs]
    if len(values) != 1 or kwargs:  # a call with more than its inputs
        return None
    inputs = _in_order(values[0], inputs_struct(network))
    if inputs is None or not all(isinstance(tensor, keras.KerasTensor) for tensor in inputs):
        return None
    known = {id(tensor): t for tensor, t in zip(node.input_tensors, given, strict=True)}
    if not all(_fits(known[id(t)], inner) for t, inner in zip(inputs, network.inputs, strict=True)):
        return None
    masks = [None] * len(inputs) if mask is None else tree.flatten(mask)
    if len(masks) != len(inputs):
        return None
    known_masks = [get_mask(tensor) for tensor in inputs]
    has_others = any(m is not None and m is not k for m, k in zip(masks, known_masks, strict=True))
    return None if has_others else inputs


def _in_order(value: Any, struct: Any) -> list[Any] | None:
    """Puts the tensors of a call into the order of the nested model's inputs."""
    if isinstance(value, dict) and isinstance(struct, list | tuple):
        names = [tensor.name for tensor in struct if isinstance(tensor, keras.KerasTensor)]
        if len(names) == len(struct) and set(names) <= set(value):
            return [value[name] for name in names]
        return None
    if isinstance(struct, list | tuple) and len(struct) == 1 and not tree.is_nested(value):
        return [value]
    try:
        tree.assert_same_structure(tree.lists_to_tuples(value), tree.lists_to_tuples(struct))
    except (ValueError, TypeError):
        return None
    return list(tree.flatten(value))


def _fits(given: Tensor, inner: Any) -> bool:
    """Returns whether the nested model takes this tensor as it is, without converting it."""
    return (
        given.dtype == inner.dtype
        and len(given.shape) == len(inner.shape)
        and not (inner.sparse or inner.ragged)
    )


def _same_weights_inside(model: Any, network: Any) -> bool:
    """Returns whether variables read inside the model have the dtype they would have outside."""
    return bool(model.compute_dtype == model.variable_dtype or not reads_variables(network))


def _supported_network(model: Any) -> Any:
    """Returns the Functional whose operations make up a model."""
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"Expected a Keras model. {_REMEDY} Received: model={model!r} (of type {type(model)})"
        )
    network = network_of(model)
    if isinstance(model, keras.Sequential) and network is None:
        raise UnsupportedModelError(
            f"Sequential model '{model.name}' is not built, so its layers are not connected yet. "
            "Begin it with a keras.Input, or call model.build(input_shape) with one tensor's shape."
        )
    if network is None or not runs_its_graph(model):
        if type(model).__call__ is not keras.layers.Layer.__call__:
            raise UnsupportedModelError(
                f"Class {type(model).__name__} of model '{model.name}' defines __call__(), which "
                "does more than look at what it gets, and stages would not run it. Move it into "
                "call()."
            )
        network = network_around(model)
    if network is None:
        raise UnsupportedModelError(
            f"Model '{model.name}' is a subclassed model (class {type(model).__name__} defines "
            "call()), and has not been called on symbolic inputs, so nobody knows their shapes and "
            "dtypes. Call it once: model(keras.Input(shape, dtype=...)), or on a list or "
            "dictionary of these, as `fit` gives it its data. Data parallel, say its inputs: "
            "tnt.Model(model, inputs=keras.Input(...))."
        )
    return network


def _check_input(tensor: Any) -> None:
    """Refuses an input of the model that cannot be given to a stage."""
    layer = input_layer_of(tensor)
    if getattr(layer, "optional", False):
        raise UnsupportedModelError(
            f"Input '{tensor.name}' is optional; stages need every input. "
            "Make it a normal keras.Input and pass zeros where there is no value."
        )
    _check_dense(tensor, f"Input '{tensor.name}'")


def _check_result(tensor: Any, node: Any, name: str) -> None:
    """Refuses a result that cannot travel between stages."""
    # Keras marks a dense tensor times a number, and what follows from that, as sparse, too
    makes_sparse = isinstance(node.operation, keras.layers.Layer) and not any(
        given.sparse for given in node.input_tensors
    )
    if makes_sparse or not tensor.sparse:
        _check_dense(tensor, f"Result '{name}'")


def _check_dense(tensor: Any, what: str) -> None:
    if tensor.sparse or tensor.ragged:
        kind = "sparse" if tensor.sparse else "ragged"
        raise UnsupportedModelError(
            f"{what} is a {kind} tensor; only dense tensors can be sent between ranks. "
            "Make it dense in the data pipeline."
        )
    if tensor.dtype == "string":
        raise UnsupportedModelError(
            f"{what} is a string tensor; strings cannot be sent between ranks. "
            "Turn them into numbers in the data pipeline, e.g. dataset.map(lookup_layer)."
        )


def _check_operation(operation: Any) -> None:
    """Refuses an operation that micro-batches would break."""
    for layer in sublayers(operation):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UnsupportedModelError(
                f"Layer '{layer.name}' is stateful: its state has one row per sample of a whole "
                "batch, so a batch cannot be cut into micro-batches. Build it with stateful=False."
            )
