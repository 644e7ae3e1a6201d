"""One call of a layer on placeholders: the calls inside of it, and what each of them follows from.

    block(x) = x + mlp(norm(x))        norm     reads x
                                       mlp      reads norm
                                       block    the rest: reads x and mlp, and adds them

The code between the calls, the glue, is not taken apart: it belongs to the call that needs it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals import functional
from tarantella_pp.internals.state import only_traced
from tarantella_pp.partition.graph.traced_costs import frontier

# Where a call is: which of the calls in the layer, which of the calls in that one, and so on.
Path = tuple[int, ...]


def is_composite(operation: Any) -> bool:
    """Whether a layer may be parted: not one of Keras' own, and it has layers inside."""
    return (
        isinstance(operation, keras.layers.Layer)
        and not functional.class_of_keras(operation)
        and not functional.repeats_itself(operation)
        and len(functional.sublayers(operation)) > 1
    )


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor in the result of a call."""

    place: int  # among the tensors of the result


class Value(NamedTuple):
    """A tensor that parts of a layer read: of the result of a call, or an argument of the whole."""

    path: Path | None  # of the call; `None` for an argument
    place: int  # among the tensors of the result, or among the arguments


@dataclass(eq=False)
class LayerCall:
    """A call of a layer, inside of another one's or the whole."""

    path: Path
    layer: Any
    start: int = 0  # operations of the graph before it
    stop: int = 0  # and when it has ended
    inner: list[LayerCall] = field(default_factory=list)
    result: Any = None  # its structure, with a `Made` for each tensor
    # The tensors of its result, and their masks, before and after they were marked as its own
    raw: list[tuple[Any, Any]] = field(default_factory=list)
    marked: list[tuple[Any, Any]] = field(default_factory=list)
    removes: tuple[int, ...] = ()  # the places of flat arguments whose masks it deletes
    whole: str = ""  # why it cannot be parted, if so

    def next_path(self, layer: Any, known: LayerCall | None = None) -> Path:
        """The path of the next call in it; a `known` one may have others in between."""
        place = self.inner[-1].path[-1] + 1 if self.inner else 0
        later = () if known is None else known.inner[place:]
        return next((call.path for call in later if call.layer is layer), (*self.path, place))

    def __iter__(self) -> Iterator[LayerCall]:
        yield self
        for call in self.inner:
            yield from call

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same whenever it is made."""
        masked = tuple(mask is not None for _, mask in self.raw)
        parts = functional.tree.flatten(self.result)
        return self.removes, masked, tuple(x if is_plain(x) else id(x) for x in parts)


def is_plain(value: Any) -> bool:
    """Whether a part of a result is nothing but a tensor or a constant."""
    return value is None or isinstance(value, (Made, bool, int, float, str))


def is_glue(layer: Any, inside: set[int]) -> bool:
    """Whether a call makes a layer that is called: `Add()([x, y])`, say; it has some by `id`."""
    return id(layer) not in inside and not layer.variables


def own_tensor(value: Any) -> Any:
    """A tensor with its mask as another one: a layer may return what it was given."""
    if not isinstance(value, tf.Tensor):
        return value
    mask, own = functional.get_mask(value), tf.identity(value)
    if mask is not None:
        functional.set_mask(own, tf.identity(mask))
    return own


def _mask_of(value: Any) -> Any:
    return functional.get_mask(value) if isinstance(value, tf.Tensor) else None


class LayerTrace:
    """One call of an operation on placeholders, with all calls of layers inside."""

    def __init__(
        self,
        operation: Any,
        arguments: Any,
        given: Mapping[int, Any],
        training: bool | None,
        like: LayerTrace | None = None,
    ) -> None:
        """Calls have the paths of another trace that they are `like`, if there is one."""
        self._like: Mapping[Path, LayerCall] = {} if like is None else like.calls
        self.graph = functional.new_graph("inside")
        self.arguments: list[Any] = []  # their placeholders
        self.variables: list[Any] = []
        self.values: dict[Any, Value] = {}  # by placeholders of arguments, and of their masks
        self.known: dict[Any, int] = {}  # places of variables, by their placeholders
        self.written: set[int] = set()  # `id` of variables
        self.losses: list[tuple[Path, Any]] = []
        self._held: dict[int, Any] = {}
        self._open: list[LayerCall] = []
        self._in_leaf = False
        self._inside = {id(operation), *map(id, functional.sublayers(operation))}
        numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - layers may draw
        try:
            with (
                self.graph.as_default(),
                functional.GlueScope(self._read, self._write, self._add),
                functional.layer_calls(self._called),
                functional.functions_inside(are_inlined=True),
                only_traced(),
            ):
                args, kwargs = arguments.fill_in({k: self._given(t) for k, t in given.items()})
                call = functional.operation_fn(operation, training=training)
                if isinstance(operation, keras.layers.Layer):
                    call(*args, **kwargs)
                else:
                    self._called(lambda _, *args, **kw: call(*args, **kw), operation, args, kwargs)
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])  # noqa: NPY002
        if self.root.layer is not operation:
            raise TypeError(f"calls '{self.root.layer.name}' before itself")
        self.operations = self.graph.get_operations()
        self.places = {op.name: place for place, op in enumerate(self.operations)}
        self.captured = {inner.ref() for _, inner in self.graph.captures}
        self.calls: dict[Path, LayerCall] = {call.path: call for call in self.root}
        inside = self.innermost(self.calls)
        for path, op in zip(inside, self.operations, strict=True):
            stateful = op.op_def.is_stateful  # it writes, draws or fails, besides computing
            if path is not None and stateful and is_composite(self.calls[path].layer):
                why = f"does not only compute outside of its layers ({op.type})"
                self.calls[path].whole = why

    def _given(self, tensor: Any) -> Any:
        value = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
        if (mask := functional.get_mask(tensor)) is not None:
            functional.set_mask(value, tf.compat.v1.placeholder("bool", mask.shape))
            self.values[functional.get_mask(value).ref()] = Value(None, len(self.arguments))
        self.values[value.ref()] = Value(None, len(self.arguments))
        self.arguments.append(value)
        return value

    def _read(self, variable: Any) -> Any:
        if id(variable) not in self._held:
            with self.graph.as_default():
                value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self._held[id(variable)] = value
            self.known[value.ref()] = len(self.variables)
            self.variables.append(variable)
        return self._held[id(variable)]

    def _write(self, variable: Any) -> None:
        self.written.add(id(variable))
        if self._open and not self._in_leaf:
            self._open[-1].whole = f"writes '{variable.path}' outside of its layers"

    def _add(self, loss: Any) -> None:
        if self._open and not self._in_leaf:
            self.losses.append((self._open[-1].path, loss))

    def _called(self, call: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        if self._in_leaf:
            return call(layer, *args, **kwargs)
        if is_glue(layer, self._inside):
            losses, result = len(self.losses), call(layer, *args, **kwargs)
            if layer.variables or losses < len(self.losses):
                raise TypeError(f"'{layer.name}' is made anew whenever it is called")
            return result
        if not getattr(layer, "built", True) and not functional.is_default(layer.build):
            raise TypeError(f"'{layer.name}' is not built")  # and is not to be built here
        path: Path = ()
        if self._open:
            around = self._open[-1]
            path = around.next_path(layer, self._like.get(around.path))
        made = LayerCall(path, layer, self.graph.version)
        if self._open:
            self._open[-1].inner.append(made)
        else:
            self.root: LayerCall = made
        flat = functional.tree.flatten((args, kwargs))
        masked = [i for i, value in enumerate(flat) if _mask_of(value) is not None]
        self._open.append(made)
        self._in_leaf = bool(path) and not is_composite(layer)
        try:
            result = call(layer, *args, **kwargs)
        finally:
            self._in_leaf = False
            self._open.pop()
        made.removes = tuple(i for i in masked if _mask_of(flat[i]) is None)
        if not path:
            self.unmasked = {self.values[flat[i].ref()].place for i in made.removes}
        return self._marked(made, result)

    def _marked(self, made: LayerCall, result: Any) -> Any:
        """Makes the tensors of a result others than those that were there before."""

        def mark(value: Any) -> Any:
            own = own_tensor(value)
            if isinstance(value, tf.Tensor):
                made.raw.append((value, functional.get_mask(value)))
                made.marked.append((own, functional.get_mask(own)))
            return own

        found = functional.tree.map_structure(mark, result)
        places = iter(range(len(made.raw)))
        made.result = functional.tree.map_structure(
            lambda value: Made(next(places)) if isinstance(value, tf.Tensor) else value, result
        )
        made.stop = self.graph.version
        return found

    def innermost(self, paths: Iterable[Path]) -> list[Path | None]:
        """For each operation the innermost of some calls that it was made in."""
        found: list[Path | None] = [None] * len(self.operations)
        for path in sorted(paths, key=len):
            call = self.calls[path]
            found[call.start : call.stop] = [path] * (call.stop - call.start)
        return found

    def tensor(self, value: Value) -> Any:
        """The tensor that stands for a value."""
        if value.path is None:
            return self.arguments[value.place]
        return self.calls[value.path].marked[value.place][0]

    @cached_property
    def likeness(self) -> tuple[Any, ...]:
        """What is equal only if another layer does all the same, with weights of its own."""

        def place(name: str) -> tuple[str, int, str]:
            operation, _, output = name.lstrip("^").partition(":")
            return name[: name.startswith("^")], self.places[operation], output

        def tensor(one: Any) -> Any:
            return place(one.name) if tf.is_symbolic_tensor(one) else one is None or object()

        operations = (
            (
                node.op,
                tuple(map(place, node.input)),
                # Private ones number custom gradients
                *((n, node.attr[n].SerializeToString()) for n in sorted(node.attr) if n[0] != "_"),
            )
            for node in self.graph.as_graph_def().node
        )
        calls = (
            (path, type(call.layer), call.start, call.stop, call.whole, *call.kind)
            for path, call in self.calls.items()
        )
        results = (tensor(one) for call in self.root for pair in call.raw for one in pair)
        return (
            *(tuple(operations), tuple(calls), tuple(results)),
            tuple((path, tensor(loss)) for path, loss in self.losses),
            tuple((bool(v.trainable), id(v) in self.written) for v in self.variables),
            tuple(place(ref.deref().name) for ref in self.known),
        )


@dataclass
class PartUse:
    """What a part reads and does: a call, or the rest of one whose calls are parts themselves."""

    values: dict[Value, None] = field(default_factory=dict)
    variables: dict[int, None] = field(default_factory=dict)  # places of those read in the glue
    operations: list[int] = field(default_factory=list)  # places in the graph


class PartsError(Exception):
    """A part reads the inside of another one."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason


class LayerParts:
    """What the parts of a traced layer read and do, with some of its calls opened."""

    def __init__(self, trace: LayerTrace, opened: frozenset[Path]) -> None:
        """Raises `PartsError` where parts cannot be told apart."""
        self._trace, self._opened = trace, opened
        nodes = [call for call in trace.root if call.path == () or call.path[:-1] in opened]
        self._inside = trace.innermost(call.path for call in nodes)
        self._values = dict(trace.values)
        for call in nodes:
            for place, pair in enumerate(call.marked if call.path else ()):
                held = [tensor.ref() for tensor in pair if tensor is not None]
                self._values.update(dict.fromkeys(held, Value(call.path, place)))
        self._taken: set[int] = set()
        self.uses = {path: self._use(path) for path in self._ordered(())}

    def _ordered(self, path: Path) -> Iterator[Path]:
        for call in self._trace.calls[path].inner:
            if call.path in self._opened:
                yield from self._ordered(call.path)
            else:
                yield call.path
        yield path  # its rest

    def _use(self, part: Path) -> PartUse:
        """What a part reads and does; what it shares with others, the first one does."""
        trace, call, own = self._trace, self._trace.calls[part], range(0)
        use, needed = PartUse(), list[Any]()
        if part in self._opened:
            needed += [tensor for pair in call.raw for tensor in pair]
            needed += [loss for path, loss in trace.losses if path == part]
            needed = [t for t in needed if t is not None and tf.is_symbolic_tensor(t)]
        else:
            own = range(call.start, call.stop)
            needed += [t for place in own for t in trace.operations[place].inputs]
            use.operations += own

        def is_given(tensor: Any) -> bool:
            ref = tensor.ref()
            if ref in self._values or ref in trace.known or ref in trace.captured:
                return True
            return trace.places[tensor.op.name] in own

        given, run = frontier(needed, is_given)
        for ref in (tensor.ref() for tensor in given):
            if ref in self._values:
                value = self._values[ref]
                self._check(part, value.path[:-1] if value.path else ())
                use.values[value] = None
            elif ref in trace.known:
                use.variables[trace.known[ref]] = None
        for place in sorted(trace.places[op.name] for op in run):
            self._check(part, self._inside[place])
            if place not in self._taken:
                use.operations.append(place)
        self._taken.update(use.operations[len(own) :])
        return use

    def _check(self, part: Path, where: Path | None) -> None:
        """Refuses what a part reads where it is neither its own glue nor that around it."""
        home = part if part in self._opened else part[:-1]
        if where is None or (where in self._opened and home[: len(where)] == where):
            return
        common = next(i for i in range(len(home), -1, -1) if where[:i] == home[:i])
        name = self._trace.calls[where].layer.name
        raise PartsError(home[:common], f"reads what is inside of '{name}', not its result")

    def handed_on(self, path: Path) -> list[Value] | None:
        """The results that a call hands on as its own, if it does nothing else."""
        if any(where == path for where, _ in self._trace.losses):
            return None
        found = []
        for tensor, mask in self._trace.calls[path].raw:
            value = self._values.get(tensor.ref())
            if value is None or value.path is None:
                return None
            held = None if mask is None else self._values.get(mask.ref())
            marked = self._trace.calls[value.path].marked[value.place][1]
            if (mask is None) != (marked is None) or (mask is not None and held != value):
                return None
            found.append(value)
        return found
