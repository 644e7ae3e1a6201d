"""What is inside of a layer: its call, made on placeholders, falls into calls of its sublayers.

    block(x) = x + mlp(norm(x))        norm     reads x
                                       mlp      reads norm
                                       block    the rest: reads x and mlp, and adds them

The code between the calls, the glue, is not taken apart: it belongs to the call that needs it.
The stages of a pipeline run all of the layer's own code once more, and make the calls that are
theirs (`runtime/stage/running_calls.py`). So nothing here has to be a copy of what the layer does;
what cannot be parted so is found, and stays whole.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import (
    class_of_keras,
    get_mask,
    is_default,
    operation_fn,
    set_mask,
    sublayers,
    tree,
)
from tarantella_pp.internals.layer_calls import (
    GlueScope,
    functions_inside,
    is_stateful,
    layer_calls,
    new_graph,
    repeats_itself,
)
from tarantella_pp.internals.state import only_traced
from tarantella_pp.launch.cause import describe
from tarantella_pp.partition.graph.placeholders import SAMPLES, SIZES, Probe, symbolic
from tarantella_pp.partition.graph.traced_costs import NodeCost, Priced, memory_of
from tarantella_pp.partition.graph.units import Shape

# Where a call is: which of the calls in the layer, which of the calls in that one, and so on.
Path = tuple[int, ...]


def is_composite(operation: Any) -> bool:
    """Whether a layer may be parted: not one of Keras' own, and it has layers inside."""
    return (
        isinstance(operation, keras.layers.Layer)
        and not class_of_keras(operation)
        and not repeats_itself(operation)
        and len(sublayers(operation)) > 1
    )


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor in the result of a call."""

    place: int  # among the tensors of the result


@dataclass(eq=False)
class LayerCall:
    """A call of a layer, inside of another one's or the whole."""

    path: Path
    layer: Any
    start: int  # operations of the graph before it
    stop: int = 0  # and when it has ended
    inner: list[LayerCall] = field(default_factory=list)
    result: Any = None  # its structure, with a `Made` for each tensor
    # The tensors of its result, and their masks, before and after they were marked as its own
    raw: list[tuple[Any, Any]] = field(default_factory=list)
    marked: list[tuple[Any, Any]] = field(default_factory=list)
    removes: tuple[int, ...] = ()  # the places of flat arguments whose masks it deletes
    whole: str = ""  # why it cannot be parted, if so

    def __iter__(self) -> Iterator[LayerCall]:
        yield self
        for call in self.inner:
            yield from call

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same whenever it is made."""
        masked = [mask is not None for _, mask in self.raw]
        return id(self.layer), self.removes, masked, [_told(x) for x in tree.flatten(self.result)]


def _told(value: Any) -> Any:
    """Something that is equal only where parts of a result are."""
    return value if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (Made, bool, int, float, str))


def is_glue(layer: Any, inside: set[int]) -> bool:
    """Whether a call makes a layer that is called: `Add()([x, y])`, say; it has some by `id`."""
    return id(layer) not in inside and not layer.variables


def own_tensor(value: Any) -> Any:
    """A tensor with its mask as another one: a layer may return what it was given."""
    if not isinstance(value, tf.Tensor):
        return value
    mask, own = get_mask(value), tf.identity(value)
    if mask is not None:
        set_mask(own, tf.identity(mask))
    return own


class Value(NamedTuple):
    """A tensor that parts of a layer read: of the result of a call, or an argument of the whole."""

    path: Path | None  # of the call; `None` for an argument
    place: int  # among the tensors of the result; for an argument its key


@dataclass(frozen=True, slots=True)
class Part:
    """A node of an opened layer: a call, or the rest of one whose calls are nodes themselves."""

    path: Path
    is_rest: bool


@dataclass
class PartUse:
    """What a part reads and does."""

    values: dict[Value, None] = field(default_factory=dict)
    variables: dict[int, Any] = field(default_factory=dict)  # read in the glue, by `id`
    operations: list[int] = field(default_factory=list)  # places in the graph


class _PartsError(Exception):
    """A part reads the inside of another one."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason


class LayerTrace:
    """One call of a layer on placeholders, with all calls inside."""

    def __init__(self, operation: Any, arguments: Any, free: dict[int, Any], training: Any):
        self.graph = new_graph("inside")
        self.inputs: dict[Any, int] = {}  # keys of placeholders and of their masks
        self._placeholders: dict[int, Any] = {}
        self.variables: dict[int, tuple[Any, Any]] = {}  # with their placeholders
        self.losses: list[tuple[Path, Any]] = []
        self.written: set[int] = set()  # `id` of variables
        self._open: list[LayerCall] = []
        self._in_leaf = False
        self._inside = {id(layer) for layer in sublayers(operation)}
        numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - layers may draw
        try:
            with (
                self.graph.as_default(),
                GlueScope(self._read, self._write, self._add),
                layer_calls(self._called),
                functions_inside(are_inlined=True),
                only_traced(),
            ):
                values = {key: self._placeholder(key, tensor) for key, tensor in free.items()}
                args, kwargs = arguments.fill_in(values)
                operation_fn(operation, training=training)(*args, **kwargs)
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])  # noqa: NPY002
        self.operations = self.graph.get_operations()
        self.places = {op.name: place for place, op in enumerate(self.operations)}
        self.known = {tensor.ref(): variable for variable, tensor in self.variables.values()}
        self.captured = {inner.ref() for _, inner in self.graph.captures}
        self.calls = {call.path: call for call in self.root}
        self._find_effects()

    def _placeholder(self, key: int, tensor: Any) -> Any:
        value = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
        self.inputs[value.ref()] = key
        self._placeholders[key] = value
        mask = get_mask(tensor)
        if mask is not None:
            held = tf.compat.v1.placeholder("bool", mask.shape)
            self.inputs[held.ref()] = key
            set_mask(value, held)
        return value

    def _read(self, variable: Any) -> Any:
        if id(variable) not in self.variables:
            with self.graph.as_default():
                value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self.variables[id(variable)] = variable, value
        return self.variables[id(variable)][1]

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
        if not layer.built and not is_default(layer.build):
            raise TypeError(f"'{layer.name}' is not built")  # and is not to be built here
        path: Path = ()
        if self._open:
            path = (*self._open[-1].path, len(self._open[-1].inner))
        made = LayerCall(path, layer, self.graph.version)
        if self._open:
            self._open[-1].inner.append(made)
        else:
            self.root = made
        given = tree.flatten((args, kwargs))
        masked = [i for i, value in enumerate(given) if _mask_of(value) is not None]
        self._open.append(made)
        self._in_leaf = bool(path) and not is_composite(layer)
        try:
            result = call(layer, *args, **kwargs)
        finally:
            self._in_leaf = False
            self._open.pop()
        made.removes = tuple(i for i in masked if _mask_of(given[i]) is None)
        if not path:
            self.unmasked = tuple(self.inputs[given[i].ref()] for i in made.removes)
        return self._marked(made, result)

    def _marked(self, made: LayerCall, result: Any) -> Any:
        """Makes the tensors of a result others than those that were there before."""

        def mark(value: Any) -> Any:
            if not isinstance(value, tf.Tensor):
                return value
            own = own_tensor(value)
            made.raw.append((value, get_mask(value)))
            made.marked.append((own, get_mask(own)))
            return own

        found = tree.map_structure(mark, result)
        places = iter(range(len(made.raw)))
        made.result = tree.map_structure(
            lambda value: Made(next(places)) if isinstance(value, tf.Tensor) else value, result
        )
        made.stop = self.graph.version
        return found

    def _find_effects(self) -> None:
        """Finds layers that do more than compute between the calls of others."""
        inside = self.innermost(self.calls)
        for place, op in enumerate(self.operations):
            path = inside[place]
            if path is not None and is_stateful(op) and is_composite(self.calls[path].layer):
                self.calls[path].whole = f"does not only compute outside of its layers ({op.type})"

    def innermost(self, paths: Iterable[Path]) -> list[Path | None]:
        """For each operation the innermost of some calls that it was made in."""
        found: list[Path | None] = [None] * len(self.operations)
        for path in sorted(paths, key=len):
            call = self.calls[path]
            found[call.start : call.stop] = [path] * (call.stop - call.start)
        return found

    def tensor(self, value: Value) -> Any:
        """The tensor that stands for a value."""
        if value.path is not None:
            return self.calls[value.path].marked[value.place][0]
        return self._placeholders[value.place]

    def parts(self, walk: _Walk) -> dict[Part, PartUse]:
        """Falls into parts: calls of opened layers, and their rests; raises `_PartsError`."""
        return {part: walk.use(part) for part in self._ordered((), walk.opened)}

    def _ordered(self, path: Path, opened: frozenset[Path]) -> Iterator[Part]:
        for call in self.calls[path].inner:
            if call.path in opened:
                yield from self._ordered(call.path, opened)
            else:
                yield Part(call.path, is_rest=False)
        yield Part(path, is_rest=True)


class _Walk:
    """Goes back from what parts need to what they are made of."""

    def __init__(self, trace: LayerTrace, opened: frozenset[Path]) -> None:
        self._trace, self.opened = trace, opened
        nodes = [call for call in trace.root if call.path == () or call.path[:-1] in opened]
        self._inside = trace.innermost(call.path for call in nodes)
        self.values = {ref: Value(None, key) for ref, key in trace.inputs.items()}
        for call in nodes:
            for place, pair in enumerate(call.marked if call.path else ()):
                for tensor in pair:
                    if tensor is not None:
                        self.values[tensor.ref()] = Value(call.path, place)
        self._taken: set[int] = set()

    def use(self, part: Part) -> PartUse:
        """What a part reads and does; what it shares with others, the first one does."""
        call = self._trace.calls[part.path]
        use, needed, own = PartUse(), list[Any](), range(0)
        if part.is_rest:
            needed += [tensor for pair in call.raw for tensor in pair if tensor is not None]
            needed += [loss for path, loss in self._trace.losses if path == part.path]
            needed = [tensor for tensor in needed if tf.is_symbolic_tensor(tensor)]
        else:
            own = range(call.start, call.stop)
            for place in own:
                needed += self._trace.operations[place].inputs
            use.operations += own
        self._follow(part, needed, own, use)
        return use

    def _follow(self, part: Part, needed: list[Any], own: range, use: PartUse) -> None:
        trace, seen = self._trace, set[Any]()
        while needed:
            tensor = needed.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            place = trace.places[tensor.op.name]
            if tensor.ref() in self.values:
                value = self.values[tensor.ref()]
                self._check(part, value.path[:-1] if value.path else ())
                use.values[value] = None
            elif tensor.ref() in trace.known:
                variable = trace.known[tensor.ref()]
                use.variables[id(variable)] = variable
            elif place not in own and tensor.ref() not in trace.captured:
                self._check(part, self._inside[place])
                needed += tensor.op.inputs
                if place not in self._taken:
                    self._taken.add(place)
                    use.operations.append(place)

    def _check(self, part: Part, where: Path | None) -> None:
        """Refuses what a part reads where it is neither its own glue nor that around it."""
        home = part.path if part.is_rest else part.path[:-1]
        if where is None or (where in self.opened and home[: len(where)] == where):
            return
        common = next(i for i in range(len(home), -1, -1) if where[:i] == home[:i])
        name = self._trace.calls[where].layer.name
        raise _PartsError(home[:common], f"reads what is inside of '{name}', not its result")

    def aliases(self, path: Path) -> list[Value] | None:
        """The results that a call hands on as its own, if it does nothing else."""
        if any(where == path for where, _ in self._trace.losses):
            return None
        found = []
        for tensor, mask in self._trace.calls[path].raw:
            value = self.values.get(tensor.ref())
            if value is None or value.path is None:
                return None
            held = None if mask is None else self.values.get(mask.ref())
            marked = self._trace.calls[value.path].marked[value.place][1]
            if (mask is None) != (marked is None) or (mask is not None and held != value):
                return None
            found.append(value)
        return found


def _mask_of(value: Any) -> Any:
    return get_mask(value) if isinstance(value, tf.Tensor) else None


@dataclass(frozen=True)
class LargestPart:
    """What the largest call of a layer may cost that is not taken apart."""

    flops: float = math.inf
    parameters: float = math.inf  # bytes
    kept: float = math.inf  # bytes
    but: frozenset[str] = frozenset()  # names of those that are, whatever they cost


@dataclass(frozen=True)
class SeenTensor:
    """A tensor that a layer is called with, or that a part of it makes."""

    shape: Shape
    dtype: str
    mask_shape: Shape | None
    probe: Probe  # its shapes for two numbers of samples


@dataclass(frozen=True)
class OpenedPart:
    """A part of an opened layer, as the graph needs it."""

    part: Part
    layer: Any
    values: tuple[Value, ...]  # what it may read
    needs: frozenset[Value]  # what it reads however it is called
    variables: tuple[Any, ...]  # that its glue reads
    makes: tuple[SeenTensor, ...]
    cost: NodeCost


@dataclass(frozen=True)
class OpenedLayer:
    """A layer that is opened."""

    calls: dict[Path, LayerCall]
    paths: frozenset[Path]  # of the calls that are opened
    parts: tuple[OpenedPart, ...]
    aliases: dict[Path, list[Value]]  # the results of calls that only hand on others


class LayerInside:
    """A call of a composite layer, with its inside."""

    def __init__(
        self,
        operation: Any,
        arguments: Any,
        given: dict[int, SeenTensor],
        flags: tuple[bool | None, bool | None],
    ) -> None:
        """`flags` are what it gets for `training` when it trains, and otherwise."""
        self._call = operation, arguments
        self._flags = flags
        self._given = given
        self._open = any(None in tensor.shape[1:] for tensor in given.values())
        self._size = SIZES[0]
        self.why_whole: dict[str, str] = {}  # by name of the layer
        self._trace = self._sized()
        self._priced: Any = None
        if self._trace is not None:
            self._priced = self._priced_as(self._trace)

    def _sized(self) -> LayerTrace | None:
        """Traces the call with sizes that it can have, in training."""
        for size in SIZES[: None if self._open else 1]:
            self._size = size
            try:
                trace = self._traced(0, self._flags[0])
                self.why_whole.clear()
                return trace
            except Exception as error:  # whatever the user's code does not like about it
                self.why_whole[self._call[0].name] = (
                    f"cannot be called on placeholders ({describe(error)})"
                )
        return None

    @functools.cached_property
    def _traces(self) -> list[LayerTrace]:
        """For two numbers of samples and for any, in training; none if one of them fails."""
        try:
            more = [self._traced(samples, self._flags[0]) for samples in (1, None)]
        except Exception as error:  # whatever the user's code does not like about it
            self.why_whole[self._call[0].name] = (
                f"cannot be called on placeholders ({describe(error)})"
            )
            return []
        return [] if self._trace is None else [self._trace, *more]

    @property
    def unmasked(self) -> tuple[int, ...]:
        """Keys of the arguments whose masks the call deletes."""
        return self._traces[2].unmasked

    def results(self) -> list[SeenTensor] | None:
        """What the call makes; `None` where that was not seen."""
        made = [trace.root.marked for trace in self._traces]
        ranks = {tuple(tensor.shape.rank for tensor, _ in each) for each in made}
        if len(ranks) != 1 or None in ranks.copy().pop():
            return None
        return [_made(self._open, *each) for each in zip(*made, strict=True)]

    def _traced(self, samples: int | None, training: bool | None) -> LayerTrace:
        operation, arguments = self._call
        free = {key: self._symbolic(tensor, samples) for key, tensor in self._given.items()}
        trace = LayerTrace(operation, arguments, free, training)
        if trace.root.layer is not operation:
            raise TypeError(f"calls '{trace.root.layer.name}' before itself")
        return trace

    def _symbolic(self, tensor: SeenTensor, samples: int | None) -> Any:
        if samples is None:
            return symbolic(tensor.shape, tensor.dtype, tensor.mask_shape)
        shape = (SAMPLES[samples], *tensor.shape[1:]) if tensor.shape else ()
        if tensor.probe is not None:
            shape = tensor.probe[samples]
        shape = tuple(self._size if size is None else size for size in shape)
        mask = tensor.mask_shape
        if mask is not None:
            pairs = zip(mask, shape, strict=False)
            mask = tuple(actual if size is None else size for size, actual in pairs)
        return symbolic(shape, tensor.dtype, mask)

    def _priced_as(self, trace: LayerTrace) -> Priced:
        given = {ref: "float" in self._given[key].dtype for ref, key in trace.inputs.items()}
        given |= {
            tensor.ref(): bool(variable.trainable) for variable, tensor in trace.variables.values()
        }
        return Priced(trace.operations, given, SAMPLES[0])

    def cost(self, path: Path = ()) -> NodeCost | None:
        """What a call costs with all that is inside; `None` where that cannot be seen."""
        if self._trace is None:
            return None
        call = self._trace.calls[path]
        given = [Value(None, key) for key in self._given] if not path else []
        cost: NodeCost = self._cost(range(call.start, call.stop), path, given)
        return cost

    def _cost(self, places: Iterable[int], path: Path, reads: Iterable[Value]) -> Any:
        trace: Any = self._trace
        makes = [Value(path, place) for place in range(len(trace.calls[path].marked))]
        memory = {memory_of(trace.tensor(value)).ref(): value for value in (*reads, *makes)}
        return self._priced.of(places, set(trace.known), memory)

    def opened(self, limits: LargestPart, name: str) -> OpenedLayer | None:
        """Opens the layer, and those in it that are larger than the limits, if that can be done."""
        exceeds = functools.partial(self._exceeds, limits, name)
        if not self._traces or not exceeds(self._traces[0].root):
            return None
        try:
            traces = [*self._traces, self._traced(None, self._flags[1])]
        except Exception as error:  # whatever the user's code does not like about it
            self.why_whole[self._call[0].name] = (
                f"cannot be called on placeholders ({describe(error)})"
            )
            return None
        while (paths := self._large(exceeds, traces)) is not None:
            try:
                return self._parted(traces, paths)
            except _PartsError as error:
                for trace in traces:
                    trace.calls[error.path].whole = error.reason
        return None

    def _parted(self, traces: list[LayerTrace], paths: frozenset[Path]) -> OpenedLayer:
        """Parts the traces of one call, which must fall into the same parts."""
        walks = [_Walk(trace, paths) for trace in traces]
        found = [trace.parts(walk) for trace, walk in zip(traces, walks, strict=True)]
        aliases: dict[Path, list[Value]] = {}
        for path in paths:
            each = [walk.aliases(path) for walk in walks]
            if each[0] is not None and all(values == each[0] for values in each):
                aliases[path] = each[0]
        parts = []
        for part, first in found[0].items():
            if part.is_rest and part.path in aliases:
                continue
            uses = [each[part] for each in found]
            values = tuple(dict.fromkeys(value for use in uses for value in use.values))
            variables = {key: v for use in uses for key, v in use.variables.items()}
            marked = [trace.calls[part.path].marked for trace in traces[:3]]
            parts.append(
                OpenedPart(
                    part,
                    traces[0].calls[part.path].layer,
                    values,
                    frozenset(values).intersection(*(use.values for use in uses)),
                    tuple(variables.values()),
                    tuple(_made(self._open, *each) for each in zip(*marked, strict=True)),
                    self._cost(first.operations, part.path, first.values),
                )
            )
        return OpenedLayer(traces[0].calls, paths, tuple(parts), aliases)

    def _large(
        self, exceeds: Callable[[LayerCall], bool], traces: list[LayerTrace]
    ) -> frozenset[Path] | None:
        """The calls that are to be opened; `None` if the layer itself cannot be."""
        found: set[Path] = set()
        for path, call in traces[0].calls.items():
            if path and path[:-1] not in found:
                continue
            if not path or (call.inner and exceeds(call)):
                reason = _why_whole([trace.calls[path] for trace in traces])
                if not reason:
                    found.add(path)
                else:
                    self.why_whole[call.layer.name] = reason
        return frozenset(found) if () in found else None

    def _exceeds(self, limits: LargestPart, name: str, call: LayerCall) -> bool:
        if limits.but:
            return name + name_of(self._traces[0].calls, call.path) in limits.but
        cost: Any = self.cost(call.path)
        parameters = sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
            for v in call.layer.trainable_variables
        )
        return bool(
            cost.flops > limits.flops
            or parameters > limits.parameters
            or cost.residual_bytes > limits.kept
        )


def name_of(calls: dict[Path, LayerCall], path: Path) -> str:
    """The names of the layers on the way to a call."""
    return "".join(f"/{calls[path[: i + 1]].layer.name}" for i in range(len(path)))


def _why_whole(calls: list[LayerCall]) -> str:
    """Why a call cannot be parted, if so, given all of its traces."""
    reason = next((call.whole for call in calls if call.whole), "")
    if reason:
        return reason
    for inner in calls[0].inner:
        for value in tree.flatten(inner.result):
            if not _is_plain(value) and not isinstance(value, keras.Variable):
                kind = type(value).__name__
                return f"calls '{inner.layer.name}', which returns a {kind}, not only tensors"
    kinds = [[inner.kind for inner in call.inner] for call in calls]
    if any(kind != kinds[0] for kind in kinds):
        return "calls other layers, or in another way, in training or for other numbers of samples"
    if not calls[0].inner:
        return "calls no layers"
    tensors = (tensor for call in calls for inner in call.inner for tensor, _ in inner.marked)
    if any(
        t.shape.rank is None or t.dtype in (tf.resource, tf.variant, tf.string) for t in tensors
    ):
        return "makes what cannot be sent"
    return ""


def _made(is_open: bool, few: Any, many: Any, general: Any) -> SeenTensor:
    """Describes a tensor by what it is for two numbers of samples, and for any."""
    sizes = [tuple(tensor.shape) for tensor, _ in (few, many)]
    # Where sizes had to be made up, the data have others.
    shape = tuple(
        size if size is not None or is_open or a != b else a
        for size, a, b in zip(general[0].shape, *sizes, strict=True)
    )
    mask = None if general[1] is None else tuple(general[1].shape)
    return SeenTensor(shape, general[0].dtype.name, mask, tuple(sizes))
