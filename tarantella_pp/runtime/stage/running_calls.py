"""Runs nodes of a model, some of which are parts of layers that are opened.

Of an opened layer a stage runs all of its own code, and makes those calls in it that are its own::

    stage 0:  norm                   y = norm(x);  z = mlp(y) is a placeholder;  x + z
    stage 1:  mlp, and the rest      y = norm(x) is what stage 0 sent;  z = mlp(y);  x + z

What is not here is a placeholder, which TensorFlow leaves out with all that follows from it. That
nothing follows from it which is of use is looked up in the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals import functional
from tarantella_pp.internals.state import needs_only_shapes, only_traced, outside_stateless_scopes
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.partition.graph.layer_trace import LayerCall, Made, Path, is_glue, own_tensor
from tarantella_pp.partition.graph.traced_costs import frontier

Observer: TypeAlias = Callable[[Call, Sequence[Any]], None]


@dataclass(frozen=True)
class Values:
    """Tensors of a model that are here, by their ids, and their masks."""

    tensors: dict[int, Any]
    masks: dict[int, Any] = field(default_factory=dict)
    observe: Observer | None = None  # is given what each node makes

    def made(self, call: Call) -> None:
        """Takes in the masks of what a node has made."""
        if self.observe is not None:
            self.observe(call, [self.tensors[tensor] for tensor in call.outputs])
        self.masks.update((t, functional.get_mask(self.tensors[t])) for t in call.outputs)


def run_calls(
    calls: Sequence[Call], values: Values, training: bool | None
) -> list[tuple[str, Any]]:
    """Adds what the nodes make to the values; returns losses that no layer keeps."""
    losses: list[tuple[str, Any]] = []
    groups = itertools.groupby(calls, lambda call: id(call.place.whole if call.place else call))
    for _, group in groups:
        some = list(group)
        if some[0].place is None:
            for call in some:
                _run_call(call, values, training)
        else:
            losses += _OpenedRun(some, values, training).run()
    return losses


def _run_call(call: Call, values: Values, training: bool | None) -> None:
    tensors = values.tensors
    for tensor in call.inputs:
        # A layer may have taken the mask off an input that others still need it with.
        mask = None if tensor in call.unmasked else values.masks.get(tensor)
        functional.set_mask(tensors[tensor], mask)
    known = {key: tensors[tensor] for key, tensor in call.bindings.items()}
    args, kwargs = call.arguments.fill_in(known)
    results = functional.operation_fn(call.operation, training=training)(*args, **kwargs)
    tensors.update(zip(call.outputs, functional.tree.flatten(results), strict=True))
    values.made(call)


class _OpenedRun:
    """Runs some parts of one call of an opened layer."""

    def __init__(self, calls: Sequence[Call], values: Values, training: bool | None) -> None:
        self._first, self._values, self._training = calls[0], values, training
        places = [call.place for call in calls if call.place is not None]
        self._whole, self._layer = places[0].whole, places[0].whole.layer
        self._here = {p.path: (p, call) for p, call in zip(places, calls, strict=True)}
        # The calls to be entered, for something inside of them is here
        self._around = {path[:i] for path in self._here for i in range(len(path))}
        self._around |= self._layer.paths & self._here.keys()
        self._own = {id(variable) for call in calls for variable in call.variables}
        self._losses: list[tuple[Path, Any]] = []  # and the calls whose code adds them
        self._missing: set[Any] = set()  # operations: placeholders of absent tensors
        self._args: dict[Path, list[Any]] = {}  # tensors that calls were given, and their masks
        self._open: list[LayerCall] = []
        self._in_leaf = False
        self._inside = {id(call.layer) for call in self._layer.calls.values()}
        self._only_shapes = needs_only_shapes()
        self._inlines = tf.config.functions_run_eagerly()

    def run(self) -> list[tuple[str, Any]]:
        """Runs the layer; returns the losses that its own code adds, as far as that is here."""
        call = self._first
        args, kwargs = call.arguments.fill_in(
            {k: self._value(t, unmasked=t in call.unmasked) for k, t in call.bindings.items()}
        )
        scope = functional.GlueScope(self._read, self._write, self._add)
        inlined = functional.functions_inside(are_inlined=True)
        with scope, functional.layer_calls(self._called), inlined, only_traced():
            functional.operation_fn(self._whole.operation, training=self._training)(*args, **kwargs)
        self._check()
        return [(self._whole.operation.name, loss) for _, loss in self._losses]

    def _value(self, tensor: int, unmasked: bool = False) -> Any:
        """A tensor that is here, or a placeholder for it, with its mask."""
        spec, mask = self._whole.tensors[tensor], None
        if tensor in self._values.tensors:
            value = self._values.tensors[tensor]
            mask = self._values.masks.get(tensor)
        else:
            value = self._placeholder(spec.dtype, spec.shape)
            if spec.mask_shape is not None:
                mask = self._placeholder("bool", spec.mask_shape)
        functional.set_mask(value, None if unmasked else mask)
        return value

    def _placeholder(self, dtype: str, shape: Any) -> Any:
        value = tf.compat.v1.placeholder(dtype, shape)
        self._missing.add(value.op)
        return value

    def _read(self, variable: Any) -> Any:
        if id(variable) in self._own:
            return None
        return self._placeholder(variable.dtype, variable.shape)

    def _write(self, variable: Any) -> None:
        raise self._error(f"writes '{variable.path}' outside of its layers")

    def _add(self, loss: Any) -> None:
        if self._open[-1].path in self._here:
            self._losses.append((self._open[-1].path, loss))

    def _called(self, call: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        if self._in_leaf or is_glue(layer, self._inside):
            return call(layer, *args, **kwargs)
        path: Path = ()
        flat = functional.tree.flatten((args, kwargs))
        if self._open:
            around = self._open[-1]
            path = around.next_path(layer, self._layer.calls[around.path])
            around.inner.append(LayerCall(path, layer))
        known = self._layer.calls.get(path)
        if known is None or known.layer is not layer:
            raise self._error(f"calls '{layer.name}' now, and not when it was read")
        if path in self._around:
            result = self._enter(path, call, layer, args, kwargs)
        elif path in self._here:
            tensors = [value for value in flat if isinstance(value, tf.Tensor)]
            self._args[path] = [*tensors, *map(functional.get_mask, tensors)]
            result = self._make(call, layer, args, kwargs)
        else:
            for place in known.removes:
                functional.set_mask(flat[place], None)
            return self._packed(known)
        if path in self._here:
            result = functional.tree.map_structure(own_tensor, result)
            made = [x for x in functional.tree.flatten(result) if isinstance(x, tf.Tensor)]
            self._values.tensors.update(zip(self._whole.made[path], made, strict=True))
            self._values.made(self._here[path][1])
            return result
        is_known = all(tensor in self._values.tensors for tensor in self._whole.made[path])
        return self._packed(known) if is_known else result

    def _enter(self, path: Path, call: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        self._open.append(LayerCall(path, layer))
        try:
            result = call(layer, *args, **kwargs)
        finally:
            made = {inner.path for inner in self._open.pop().inner}
        for inner in self._layer.calls[path].inner:
            if inner.path not in made:
                self._leave_out(inner)
        return result

    def _leave_out(self, known: LayerCall) -> None:
        """Makes something in place of what a call makes that is there for training only."""
        place, call = self._here.get(known.path, (None, None))
        given = {} if place is None else {self._spec(tensor): tensor for tensor in place.reads}
        made = () if call is None else call.outputs
        if self._training is not False or not given.keys() >= {*map(self._spec, made)}:
            raise self._error(f"does not call '{known.layer.name}', as when it was read")
        for tensor in made:
            self._values.tensors[tensor] = own_tensor(self._value(given[self._spec(tensor)]))
        if call is not None:
            self._values.made(call)

    def _spec(self, tensor: int) -> tuple[Any, ...]:
        spec = self._whole.tensors[tensor]
        return spec.shape, spec.dtype, spec.mask_shape

    def _make(self, call: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        self._in_leaf = True
        try:
            as_it_is = functional.functions_inside(are_inlined=self._inlines)
            with outside_stateless_scopes(), as_it_is, only_traced(self._only_shapes):
                return call(layer, *args, **kwargs)
        finally:
            self._in_leaf = False

    def _packed(self, known: LayerCall) -> Any:
        """The result of a call, of tensors that are here, and of placeholders."""
        made = self._whole.made.get(known.path, ())

        def value(part: Any) -> Any:
            return self._value(made[part.place]) if isinstance(part, Made) else part

        return functional.tree.map_structure(value, known.result)

    def _check(self) -> None:
        """Refuses parts that follow from something else than when the layer was read."""
        known: dict[Any, set[int]] = {}
        tensors, masks = self._values.tensors, self._values.masks
        for tensor, value in (*tensors.items(), *masks.items()):
            if value is not None:
                known.setdefault(value.ref(), set()).add(tensor)
        for place, call in self._here.values():
            made = [values.get(t) for values in (tensors, masks) for t in call.outputs]
            made += [loss for path, loss in self._losses if path == place.path]
            found, is_missing = self._sources(made, known, set(call.outputs))
            if is_missing:
                raise self._error(f"'{call.name}' needs more than when it was read")
            # What a call is given may be there for its effects alone.
            found |= self._sources(self._args.get(place.path, ()), known, set())[0]
            if not place.needs <= found:
                raise self._error(f"'{call.name}' needs less than when it was read")

    def _sources(
        self, tensors: Sequence[Any], known: dict[Any, set[int]], own: set[int]
    ) -> tuple[set[int], bool]:
        """The tensors of the model that some follow from, and whether from missing ones, too."""
        wanted = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
        given, run = frontier(wanted, lambda tensor: bool(known.get(tensor.ref(), own) - own))
        found = {t for tensor in given for t in known[tensor.ref()] - own}
        return found, not self._missing.isdisjoint(run)

    def _error(self, what: str) -> UnsupportedModelError:
        name = self._whole.operation.name
        return UnsupportedModelError(
            f"Layer '{name}' is cut into stages, and {what}. Its `call` must make the same calls "
            "whenever it runs, and must not look at values, or plan with fewer stages, so that it "
            "stays whole."
        )
