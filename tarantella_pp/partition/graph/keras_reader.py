"""Reads a Keras model into a layer graph: nested models opened, one node for every call."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import keras

from tarantella_pp.cause import describe
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals import parted
from tarantella_pp.internals.functional import (
    build_late,
    input_layer_of,
    inputs_struct,
    network_around,
    network_of,
    ordered_nodes,
    outputs_struct,
    runs_its_graph,
    states_of,
    takes_training,
    trained_variables,
)
from tarantella_pp.partition.graph.calls import (
    Call,
    OpenedCall,
    PlaceInside,
    graph_of,
    opened_inputs,
)
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Tensor
from tarantella_pp.partition.graph.layer_inside import (
    LargestPart,
    LayerInside,
    Looked,
    OpenedLayer,
    name_of,
)
from tarantella_pp.partition.graph.layer_trace import LayerTrace, Path, Value
from tarantella_pp.partition.graph.placeholders import (
    SIZES,
    SeenTensor,
    is_known_by_rule,
    made_by_rule,
    probe_of,
)
from tarantella_pp.partition.graph.traced_costs import NodeCost
from tarantella_pp.partition.graph.units import item_bytes, sample_shape

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
    looked: Looked  # what is known of the insides of its calls, and all readings

    @property
    def kept_whole(self) -> dict[str, str]:
        """Layers with layers inside that cannot be opened, by name, and why."""
        return {k: v for each in self.looked.insides.values() for k, v in each.why_whole.items()}

    def planned_by(self, fingerprint: str, names: Iterable[str]) -> ExtractedModel:
        """The model with those layers opened that a plan takes for opened; itself if unknown.

        What exceeds a level depends on what is trained, and so it may be told by names of nodes.
        """
        names = list(names)
        steps = [name.split("/") for name in names]
        around = frozenset("/".join(s[:i]) for s in steps for i in range(1, len(s)))
        limits = [LargestPart(but=around, cut=frozenset(names))] if around else []
        before = [self, *self.looked.readings.values()]
        later = itertools.chain(map(self._opened, limits), map(self.at_level, self.levels))
        readings = itertools.chain(before, later)
        return next((each for each in readings if each.graph.fingerprint() == fingerprint), self)

    @property
    def levels(self) -> range:
        """How far layers may be opened; see `at_level`."""
        opens = any(each.opens for each in self.looked.insides.values())
        cuts = any(parted.can_be_cut(each.operation, each.arguments) for each in self.calls)
        return range(1, _FINEST if opens or cuts else 1)

    def at_level(self, level: int, most: tuple[float, float] | None = None) -> ExtractedModel:
        """Reads the model once more, with layers opened that have layers inside.

        Those are opened that make up more than `1 / 2 ** level` of the whole, again and again.
        Layers with more than some share of its operations, or of its weights, are cut by columns.
        """
        key = level if most is None or not level else (level, most)
        readings: dict[Any, ExtractedModel] = self.looked.readings
        if key not in readings:
            graph, share = readings[0].graph, 0.5**level
            most_flops, most_bytes = most or (math.inf, math.inf)
            flops = sum(node.flops for node in graph.nodes)
            weights = sum(weight.bytes for weight in graph.weights if weight.trainable)
            limits = LargestPart(
                share * flops,
                share * weights,
                share * sum(node.residual_bytes for node in graph.nodes),
                cut_flops=most_flops * flops,
                cut_bytes=most_bytes * weights,
            )
            readings[key] = self._opened(limits)
        return readings[key]

    def _opened(self, limits: LargestPart) -> ExtractedModel:
        return _Reader(self.model, self.looked, limits).extracted()


# More levels than any model needs.
_FINEST = 13


def extract(model: keras.Model | ExtractedModel) -> ExtractedModel:
    """Reads a model's operations into a graph, without changing the model.

    Nested Functional and Sequential models are opened, as often as they are called, down to
    layers and `keras.ops` calls. A nested model stays one node where opening it could change a
    result: it overrides `call()`, has an activity regularizer, converts its inputs, or gets a
    mask of its own.
    """
    if isinstance(model, ExtractedModel):
        return model
    network = _supported_network(model)
    try:
        build_late(model, inputs_struct(network))
    except Exception as error:  # of code that needs values, or sizes that are not known
        raise UnsupportedModelError(
            f"'{model.name}' has layers that cannot be built without data: {describe(error)}. "
            "Call it on some samples first, or give all sizes that it needs in keras.Input(shape)."
        ) from error
    looked = Looked(network, knows_no_training=not takes_training(model))
    found = looked.readings[0] = _Reader(model, looked, None).extracted()
    return found


class _Reader:
    """Walks through models as Keras runs them, and opens what is larger than the limits.

    An `env` maps `id` of the symbolic tensors of one model, in one call of it, to tensor ids.
    """

    def __init__(self, model: Any, looked: Looked, limits: LargestPart | None) -> None:
        self._model, self._looked, self._limits = model, looked, limits
        self._whole: ExtractedModel | None = looked.readings.get(0)  # with nothing opened
        # Of each weight how calls use it, and what a layer computes in all of its calls
        self._uses: defaultdict[int, list[Any]] = defaultdict(list)
        self._flops: defaultdict[int, float] = defaultdict(float)
        whole = self._whole
        for call, node in zip(whole.calls, whole.graph.nodes, strict=True) if whole else ():
            layer, given = call.operation, call.arguments
            self._flops[id(layer)] += node.flops
            use = (id(layer), parted.goes_back(given), parted.can_be_cut(layer, given))
            for v in call.variables:
                self._uses[id(v)].append(use)
        self._owned = {id(variable) for variable in model.variables}
        self._tensors: list[Tensor] = []  # an id is a position
        self._seen: list[SeenTensor] = []  # each as it is now: a call may have deleted its mask
        self._calls: list[Call] = []
        self._parts: dict[int, dict[int, None]] = {}  # of weights that are cut, all by `id`
        self._names: Counter[str] = Counter()
        self._visits: Counter[int] = Counter()  # of nodes: nested models may be called often

    def extracted(self) -> ExtractedModel:
        """Reads the model."""
        model, network = self._model, self._looked.network
        env: dict[int, int] = {}
        for tensor in network.inputs:
            if getattr(input_layer_of(tensor), "optional", False):
                raise UnsupportedModelError(
                    f"Input '{tensor.name}' is optional; stages need every input. "
                    "Make it a normal keras.Input and pass zeros where there is no value."
                )
            _check_dense(tensor, f"Input '{tensor.name}'")
            shape = tuple(tensor.shape)
            seen = SeenTensor(shape, tensor.dtype, None, probe_of(shape))
            env[id(tensor)] = self._add_tensor(tensor.name, seen)
        self._read(network, env, prefix="")
        inputs = tuple(env[id(tensor)] for tensor in network.inputs)
        outputs = tuple(env[id(tensor)] for tensor in network.outputs)
        if passed_on := [self._tensors[i].name for i in outputs if i in inputs]:
            raise UnsupportedModelError(
                f"Outputs {passed_on} of model '{model.name}' are its inputs as they are, so no "
                "stage computes them. Leave them out of the outputs."
            )
        found = {id(v): v for call in self._calls for v in call.variables}
        # As in the model with nothing opened, so that files of a run know them by their places
        before = () if self._whole is None else self._whole.variables
        order = [part for v in before for part in self._parts.get(id(v), [id(v)])]
        variables = tuple({v: found[v] for v in (*order, *found) if v in found}.values())
        graph = graph_of(
            self._tensors, self._calls, variables, self._states(), inputs=inputs, outputs=outputs
        )
        return ExtractedModel(
            model=model,
            graph=graph,
            calls=tuple(self._calls),
            variables=variables,
            inputs_struct=inputs_struct(network),
            outputs_struct=outputs_struct(network),
            looked=self._looked,
        )

    def _add_tensor(self, name: str, seen: SeenTensor) -> int:
        entries = math.prod(sample_shape(seen.shape, SIZES[0]))
        tensor = Tensor(
            id=len(self._tensors),
            name=name,
            shape=seen.shape,
            dtype=seen.dtype,
            # Tables of positions have no row for a sample; they count as one, never as nothing.
            bytes_per_sample=max(1, seen.rows or 1) * entries * item_bytes(seen.dtype),
            mask_shape=seen.mask_shape,
            rows_per_sample=seen.rows,
            sample_axis=seen.sample_axis,
            has_gradient=seen.has_gradient,
        )
        self._tensors.append(tensor)
        self._seen.append(seen)
        return tensor.id

    def _add_tensors(
        self, name: str, made: Sequence[SeenTensor], layer: Any, reads: Iterable[int], weights: Any
    ) -> tuple[int, ...]:
        """Adds what a call makes; gradients flow back to trained weights, from numbers only."""
        upstream = any(weight.trainable for weight in weights)
        upstream |= any(self._seen[t].has_gradient for t in reads)
        upstream &= type(layer).__name__ != "StopGradient"
        found = []
        for i, seen in enumerate(made):
            flows = upstream and any(kind in seen.dtype for kind in ("float", "complex"))
            label = f"{name}[{i}]" if len(made) > 1 else name
            found.append(self._add_tensor(label, replace(seen, has_gradient=flows)))
        return tuple(found)

    def _unique_name(self, path: str) -> str:
        """Returns the path itself the first time, then `"path:1"`, `"path:2"` and so on."""
        name = path
        while self._names[name]:
            name = f"{path}:{self._names[path]}"
            self._names[path] += 1
        self._names[name] += 1
        return name

    def _read(self, network: Any, env: dict[int, int], prefix: str) -> None:
        """Adds all calls of a Functional, and puts the tensors they make into `env`."""
        for node in ordered_nodes(network):
            if node.is_input or any(id(tensor) not in env for tensor in node.input_tensors):
                continue  # as Keras does: not computable from these inputs, so not needed
            path = prefix + node.operation.name
            given = [self._tensors[env[id(tensor)]] for tensor in node.input_tensors]
            inner_inputs = opened_inputs(node, given)
            if inner_inputs is None:
                bindings = {id(tensor): env[id(tensor)] for tensor in node.input_tensors}
                made = self._add_call(node, bindings, path)
                env.update(zip(map(id, node.outputs), made, strict=True))
                continue
            inner = network_of(node.operation)
            inner_env = {
                id(inner_tensor): env[id(tensor)]
                for inner_tensor, tensor in zip(inner.inputs, inner_inputs, strict=True)
            }
            self._read(inner, inner_env, f"{path}/")
            for tensor, inner_tensor in zip(node.outputs, inner.outputs, strict=True):
                env[id(tensor)] = inner_env[id(inner_tensor)]

    def _add_call(self, node: Any, bindings: dict[int, int], path: str) -> tuple[int, ...]:
        """Adds a call as one node, or as several if it is opened; returns what it makes."""
        given = {key: self._seen[t] for key, t in bindings.items()}
        call = Call(
            name="",
            operation=node.operation,
            arguments=node.arguments,
            bindings=bindings,
            unmasked=frozenset(
                t
                for t in bindings.values()
                if self._seen[t].mask_shape != self._tensors[t].mask_shape
            ),
            knows_no_training=self._looked.knows_no_training,
        )
        by_rule = is_known_by_rule(node.operation, given)
        self._visits[id(node)] += 1
        visit = id(node), self._visits[id(node)]
        if visit not in self._looked.insides:  # it is looked into once for all readings
            self._looked.insides[visit] = LayerInside(node, given, self._looked)
        inside = self._looked.insides[visit]
        if (parts := self._parts_wanted(node, path)) > 1:
            return self._read_cut(node, parts, bindings, path)
        opened = None if self._limits is None else inside.opened(self._limits, path)
        seen = None if by_rule else inside.results()
        if opened is not None:
            removed, outputs = inside.unmasked, self._add_parts(call, opened, path)
        else:
            if not by_rule and inside.num_results not in (None, len(node.outputs)):
                raise UnsupportedModelError(
                    f"'{call.operation.name}' ({type(call.operation).__name__}) returns another "
                    f"number of tensors in training ({inside.num_results}) than otherwise "
                    f"({len(node.outputs)}, on keras.Input). Return all in both, and predict with "
                    "another keras.Model of its layers, or write a train_step (tnt.Model)."
                )
            if seen is None or len(seen) != len(node.outputs):
                seen, removed = made_by_rule(node, given)
            else:
                removed = inside.unmasked
            outputs = self._add_whole(node, call, seen, inside, path)
        for key in removed:
            t = bindings[key]
            self._seen[t] = replace(self._seen[t], mask_shape=None)
        return outputs

    def _parts_wanted(self, node: Any, path: str) -> int:
        limits, layer = self._limits, node.operation
        if limits is None or not parted.can_be_cut(layer, node.arguments):
            return 1
        if limits.but:
            return parted.parts_named(limits.cut, path)
        # Called once, or once to look up words and once to go back to them
        ways = {(id(layer), False, True): 1, (id(layer), True, True): 1}
        if any(Counter(self._uses[id(v)]) - Counter(ways) for v in layer.variables):
            return 1
        flops = self._flops[id(layer)]
        share = max(flops / limits.cut_flops, parted.bytes_of(layer.variables) / limits.cut_bytes)
        return parted.number_of_parts(layer, share) if share > 1 else 1

    def _read_cut(
        self, node: Any, parts: int, bindings: dict[int, int], path: str
    ) -> tuple[int, ...]:
        """Adds a layer as several that have some of its columns each."""
        back = parted.goes_back(node.arguments)
        network = parted.cut(node.operation, node.input_tensors[0], parts, back=back)
        for part in (part for layer in network.layers for part in layer.variables):
            self._parts.setdefault(id(parted.whole_of(part)), {})[id(part)] = None
        env = {id(network.inputs[0]): bindings[id(node.input_tensors[0])]}
        self._read(network, env, f"{path}/")
        return (env[id(network.outputs[0])],)

    def _add_whole(
        self, node: Any, call: Call, seen: list[SeenTensor], inside: LayerInside, path: str
    ) -> tuple[int, ...]:
        name = self._unique_name(path)
        sampled = any(self._tensors[t].shape[:1] == (None,) for t in call.bindings.values())
        made = []
        for said in seen:
            any_number = sampled and said.shape[:1] == (1,) and said.rows == 1
            shape = (None, *said.shape[1:]) if any_number else said.shape
            made.append(replace(said, shape=shape))
        bound = [*call.bindings.values()]
        variables = tuple(states_of(node.operation, node.arguments))
        outputs = self._add_tensors(name, made, node.operation, bound, variables)
        for tensor, t in zip(node.outputs, outputs, strict=True):
            _check_result(tensor, node, self._tensors[t].name)
        cost = inside.cost()
        if cost is not None:
            cost = _cost(cost, lambda v: bound[v.place] if v.path is None else outputs[v.place])
        past = tuple(v for v in states_of(None, node.arguments) if id(v) in self._owned)
        whole = replace(call, name=name, outputs=outputs, variables=variables, cost=cost, past=past)
        self._calls.append(whole)
        return outputs

    def _add_parts(self, call: Call, opened: OpenedLayer, path: str) -> tuple[int, ...]:
        """Adds the parts of an opened layer as nodes; returns what it makes."""
        made: dict[Path, tuple[int, ...]] = {}
        whole = OpenedCall(call.operation, opened, made, self._tensors)
        bound = [*call.bindings.values()]

        def tensor_of(value: Value) -> int:
            if value.path is None:
                return bound[value.place]
            if value.path not in made:
                made[value.path] = tuple(map(tensor_of, opened.aliases[value.path]))
            return made[value.path][value.place]

        for part in opened.parts:
            where, layer = part.path, opened.calls[part.path].layer
            name = self._unique_name(path + name_of(opened.calls, where))
            read = [opened.variables[place] for place in part.variables]
            is_rest = where in opened.paths
            own = () if is_rest else states_of(layer)
            variables = tuple({id(v): v for v in (*own, *read)}.values())
            reads = tuple(map(tensor_of, part.values))
            made[where] = self._add_tensors(name, part.makes, layer, reads, variables)
            needs = frozenset(map(tensor_of, part.needs))
            place = PlaceInside(whole, where, layer, reads, needs)
            self._calls.append(
                replace(
                    call,
                    name=name,
                    operation=Rest(layer.name) if is_rest else layer,
                    outputs=made[where],
                    variables=variables,
                    cost=_cost(part.cost, tensor_of),
                    place=place,
                    past=tuple(v for v in read if id(v) in self._owned),
                )
            )
        for inner, values in opened.aliases.items():
            made.setdefault(inner, tuple(map(tensor_of, values)))
        return made[()]

    def _states(self) -> set[int]:
        """Variables, by `id`, that calls change, and not optimizers alone.

        All that no optimizer may train, but constants that several calls share: these are tried.
        """
        trained = {id(v) for call in self._calls for v in trained_variables(call.operation)}
        # What only the code between layers reads nothing writes; metrics are a layer's as well.
        held = {id(v) for call in self._calls for v in states_of(call.operation)} - trained
        users = Counter(id(v) for call in self._calls for v in call.variables if id(v) in held)
        shared = {key for key, count in users.items() if count > 1}
        sharing = {
            id(call.arguments): call
            for call in self._calls
            if any(id(variable) in shared for variable in call.variables)
        }
        return (held - shared).union(*(shared & self._written(c) for c in sharing.values()))

    def _written(self, call: Call) -> set[int]:
        """The variables that a call may change, whatever is frozen now."""
        operation = call.operation if call.place is None else call.place.whole.operation
        free = {key: self._seen[t].symbolic() for key, t in call.bindings.items()}
        try:
            with mock.patch.object(keras.layers.Layer, "trainable", new=True):
                both = [LayerTrace(operation, call.arguments, free, how) for how in (True, False)]
        except Exception:  # whatever the user's code does not like about it
            return {id(variable) for variable in states_of(operation)}
        return both[0].written | both[1].written


def _cost(cost: NodeCost, tensor_of: Callable[[Value], int]) -> NodeCost:
    def renamed(value: Hashable) -> Hashable:
        return tensor_of(value) if isinstance(value, Value) else value

    operations = (
        one._replace(
            reads=tuple(map(renamed, one.reads)),
            makes=tuple((renamed(value), size) for value, size in one.makes),
        )
        for one in cost.operations
    )
    return replace(
        cost,
        keeps=tuple(dict.fromkeys(map(tensor_of, cost.keeps))),
        operations=tuple(operations),
        needed=tuple(map(renamed, cost.needed)),
    )


class Rest(keras.Operation):
    """What a layer computes besides the calls of those in it."""


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
            "dictionary of these, as `fit` gives it its data. A model of a file: load it with "
            "keras.models.load_model, call it, and wrap it. Data parallel, say its inputs: "
            "tnt.Model(model, inputs=keras.Input(...))."
        )
    return network


def _check_result(tensor: Any, node: Any, name: str) -> None:
    # Keras marks a dense tensor times a number, and what follows from that, as sparse, too
    given_sparse = any(given.sparse for given in node.input_tensors)
    is_layer = isinstance(node.operation, keras.layers.Layer)
    if not tensor.sparse or (is_layer and not given_sparse):
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
