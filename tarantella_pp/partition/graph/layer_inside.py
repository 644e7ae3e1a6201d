"""What is inside of a layer: its call, made on placeholders, falls into calls of its sublayers.

The stages of a pipeline run all of the layer's own code once more, and make the calls that are
theirs (`runtime/stage/running_calls.py`). So nothing here has to be a copy of what the layer does;
what cannot be parted so is found, and stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.cause import describe
from tarantella_pp.internals.functional import class_of_keras, get_mask, likeness_of, tree
from tarantella_pp.internals.parted import bytes_of
from tarantella_pp.partition.graph.layer_trace import (
    LayerCall,
    LayerParts,
    LayerTrace,
    PartsError,
    PartUse,
    Path,
    Value,
    is_composite,
    is_plain,
)
from tarantella_pp.partition.graph.placeholders import SAMPLES, SIZES, SeenTensor
from tarantella_pp.partition.graph.traced_costs import NodeCost, Priced, memory_of


@dataclass(frozen=True)
class LargestPart:
    """What the largest call of a layer may cost that is not taken apart."""

    flops: float = math.inf
    parameters: float = math.inf  # bytes
    kept: float = math.inf  # bytes
    but: frozenset[str] = frozenset()  # names of those that are, whatever they cost
    # Of a layer that is not cut by columns; or the nodes of a plan, whose names say which are cut
    cut_flops: float = math.inf
    cut_bytes: float = math.inf
    cut: frozenset[str] = frozenset()


# Which calls are to be opened: those that are larger, or these.
Wanted = LargestPart | frozenset[Path]


@dataclass(frozen=True)
class OpenedPart:
    """A part of an opened layer, as the graph needs it."""

    path: Path
    values: tuple[Value, ...]  # what it may read
    needs: frozenset[Value]  # what it reads however it is called
    variables: tuple[int, ...]  # places of those that its glue reads
    makes: tuple[SeenTensor, ...]
    cost: NodeCost


@dataclass(frozen=True)
class OpenedLayer:
    """A layer that is opened."""

    paths: frozenset[Path]  # of the calls that are opened
    parts: tuple[OpenedPart, ...]
    aliases: dict[Path, list[Value]]  # the results of calls that only hand on others
    calls: dict[Path, LayerCall]
    variables: list[Any]


@dataclass(frozen=True)
class Looked:
    """What is known of a model's calls."""

    network: Any  # the Functional whose operations make it up
    knows_no_training: bool
    insides: dict[tuple[int, int], LayerInside] = field(default_factory=dict)  # by node and visit
    alike: dict[Any, Inside] = field(default_factory=dict)  # what layers have in common
    readings: dict[Any, Any] = field(default_factory=dict)  # of the model, by level


# What calls of Keras' own layers cost whose configurations say all.
_COSTS: dict[Any, NodeCost] = {}


class LayerInside:
    """A call of an operation, with its inside, which nobody looks into before that is of use."""

    def __init__(self, node: Any, given: dict[int, SeenTensor], looked: Looked) -> None:
        """Layers whose traces are alike share what is known of them."""
        self._operation, self._arguments = node.operation, node.arguments
        self._given, self._looked = given, looked
        self.opens = is_composite(node.operation)  # whether it may be parted
        self._failure = ""

    @cached_property
    def _text(self) -> str | None:
        is_of_keras = class_of_keras(self._operation)
        return likeness_of(self._operation, self._arguments) if is_of_keras else None

    @cached_property
    def _found(self) -> tuple[LayerTrace, Inside] | None:
        given, known = self._given, self._looked.alike
        is_open = any(None in tensor.shape[1:] for tensor in given.values())
        # What it gets for `training` when it trains, and otherwise
        flags = (None, None) if self._looked.knows_no_training else (True, False)
        for size in SIZES if is_open else (1,):
            tracer = partial(self._traced, size)
            try:
                trace = tracer(0, flags[0], None)
            except Exception as error:  # whatever the user's code does not like about it
                self._failure = _short(error)
                continue
            key = size, *given.values(), self._text or trace.likeness
            if key not in known:
                known[key] = Inside(trace, tracer, flags, is_open, list(given.values()))
            return trace, known[key]
        return None

    def _traced(
        self, size: int, samples: int | None, training: bool | None, like: LayerTrace | None
    ) -> LayerTrace:
        made = {key: tensor.symbolic(samples, size) for key, tensor in self._given.items()}
        return LayerTrace(self._operation, self._arguments, made, training, like)

    @property
    def why_whole(self) -> dict[str, str]:
        """The layers that cannot be opened, by name, and why."""
        if not self.opens or self._found is None:
            return {self._operation.name: self._failure} if self.opens else {}
        trace, inside = self._found
        return {trace.calls[path].layer.name: why for path, why in inside.why_whole.items()}

    def results(self) -> list[SeenTensor] | None:
        """What the call makes; `None` where nobody saw it."""
        return None if self._found is None else self._found[1].results

    @property
    def num_results(self) -> int | None:
        """How many results, `None` among them, the call has; `None` where nobody saw it."""
        return None if self._found is None else len(tree.flatten(self._found[0].root.result))

    @property
    def unmasked(self) -> set[int]:
        """Keys of the arguments whose masks the call deletes, where its results are known."""
        traces = [] if self._found is None else self._found[1].traces
        keys = [*self._given]
        return {keys[place] for place in traces[2].unmasked} if traces else set()

    def cost(self) -> NodeCost | None:
        """What the call costs with all that is inside; `None` where nobody saw it."""
        costs = {} if self._text is None else _COSTS
        key = self._text, self._looked.knows_no_training, *self._given.values()
        if key not in costs and self._found is not None:
            costs[key] = self._found[1].cost()
        return costs.get(key)

    def opened(self, limits: LargestPart, name: str) -> OpenedLayer | None:
        """Opens the layer, and those in it that are larger than the limits, if that can be done."""
        if not self.opens or self._found is None:
            return None
        trace, inside = self._found
        paths = {path for path in trace.calls if name + name_of(trace.calls, path) in limits.but}
        found = inside.opened(frozenset(paths) if limits.but else limits)
        if found is None:
            return None
        return replace(found, calls=trace.calls, variables=trace.variables)


class Inside:
    """What layers have in common whose calls do the same."""

    def __init__(
        self,
        trace: LayerTrace,
        traced: Callable[..., LayerTrace],  # given samples, `training`, a trace it is like
        flags: tuple[bool | None, bool | None],
        is_open: bool,
        given: list[SeenTensor],
    ) -> None:
        self.why_whole: dict[Path, str] = {}
        self._trace, self._traced, self._flags, self._is_open = trace, traced, flags, is_open
        flows = {ref: given[value.place].has_gradient for ref, value in trace.values.items()}
        flows |= {ref: bool(trace.variables[i].trainable) for ref, i in trace.known.items()}
        fixed = {
            ref for ref, i in trace.known.items() if id(trace.variables[i]) not in trace.written
        }
        self._priced = Priced(trace.operations, flows, fixed, SAMPLES[0])
        self.opened = cache(self._open)

    @cached_property
    def traces(self) -> list[LayerTrace]:
        """For two numbers of samples and for any, in training; none if one of them fails."""
        return self._all((0, 1, None), self._flags[0])

    def _all(self, samples: Iterable[int | None], training: bool | None) -> list[LayerTrace]:
        try:
            known = self._trace
            return [self._traced(n, training, known) if n != 0 else known for n in samples]
        except Exception as error:  # whatever the user's code does not like about it
            self.why_whole[()] = _short(error)
            return []

    @cached_property
    def results(self) -> list[SeenTensor] | None:
        """What the call makes; `None` where nobody saw it."""
        made = [trace.root.marked for trace in self.traces]
        ranks = {tuple(tensor.shape.rank for tensor, _ in each) for each in made}
        if len(ranks) != 1 or None in next(iter(ranks)):
            return None
        return [_made(self._is_open, *each) for each in zip(*made, strict=True)]

    def cost(self, path: Path = ()) -> NodeCost:
        """What a call costs with all that is inside."""
        call = self._trace.calls[path]
        given = range(len(self._trace.arguments)) if not path else ()
        return self._cost(range(call.start, call.stop), path, [Value(None, i) for i in given])

    def _cost(self, places: Iterable[int], path: Path, reads: Iterable[Value]) -> NodeCost:
        marked = self._trace.calls[path].marked
        values = [*reads, *(Value(path, place) for place in range(len(marked)))]
        memory = {memory_of(self._trace.tensor(value)).ref(): value for value in values}
        return self._priced.of(places, memory)

    def _open(self, wanted: Wanted) -> OpenedLayer | None:
        """Opens it as far as that is wanted, if that can be done."""
        if not self.traces or not self._exceeds(self._trace.root, wanted):
            return None
        traces = [*self.traces, *self._all((None,), self._flags[1])]
        if len(traces) == len(self.traces):
            return None
        while (paths := self._large(wanted, traces)) is not None:
            try:
                return self._parted(traces, paths)
            except PartsError as error:
                for trace in traces:
                    trace.calls[error.path].whole = error.reason
        return None

    def _parted(self, traces: list[LayerTrace], paths: frozenset[Path]) -> OpenedLayer:
        """Parts the traces of one call, which must fall into the same parts."""
        each = [LayerParts(trace, paths) for trace in traces]
        handed = {path: [parts.handed_on(path) for parts in each] for path in paths}
        aliases = {
            path: values[0]
            for path, values in handed.items()
            if values[0] is not None and all(other == values[0] for other in values)
        }
        used = [value for parts in each for use in parts.uses.values() for value in use.values]
        used += [value for values in aliases.values() for value in values]
        met = paths.union(value.path for value in used)
        found = []
        for path, first in each[0].uses.items():
            home, call = path[:-1], traces[0].calls[path]
            if path not in met:  # as within tf.vectorized_map
                raise PartsError(home, f"does not use what it calls '{call.layer.name}' for")
            if path and any(tensor.name in self._in_turn for tensor, _ in call.marked):
                raise PartsError(home, f"has a row of each sample in turn in '{call.layer.name}'")
            if path in aliases:
                continue
            uses = [parts.uses.get(path, PartUse()) for parts in each]
            if path not in each[-1].uses and not _keeps_specs(traces, path, first.values):
                raise PartsError(
                    home, f"calls '{call.layer.name}' in training only, which gives another shape"
                )
            read = [
                {id(trace.variables[place]) for place in use.variables}
                for trace, use in zip(traces, uses, strict=True)
            ]
            if any(other - read[0] for other in read):
                home = path if path in paths else home
                raise PartsError(home, "reads other weights when it does not train")
            values = tuple(dict.fromkeys(value for use in uses for value in use.values))
            marked = [trace.calls[path].marked for trace in traces[:3]]
            found.append(
                OpenedPart(
                    path,
                    values,
                    frozenset(values).intersection(*(use.values for use in uses)),
                    tuple(first.variables),
                    tuple(_made(self._is_open, *made) for made in zip(*marked, strict=True)),
                    self._cost(first.operations, path, first.values),
                )
            )
        return OpenedLayer(paths, tuple(found), aliases, {}, [])

    @cached_property
    def _in_turn(self) -> set[str]:
        """Names of tensors that have one row of each sample, then another one of each."""
        found, unit = dict[str, int](), SAMPLES[1] - SAMPLES[0]
        for one, other in zip(*(trace.operations for trace in self.traces[:2]), strict=False):
            inputs = [*map(_growth, one.inputs, other.inputs)]
            for tensor, rows, blocks in map(_growth, one.outputs, other.outputs):
                begins = one.type == "Reshape" and blocks < inputs[0][2]
                begins |= one.type in ("ConcatV2", "Tile") and rows > inputs[0][1] > 0
                if rows != unit and (begins or any(name in found for name, _, _ in inputs)):
                    found[tensor] = rows
        return {name for name, rows in found.items() if rows > unit}

    def _large(self, wanted: Wanted, traces: list[LayerTrace]) -> frozenset[Path] | None:
        """The calls that are to be opened; `None` if the layer itself cannot be."""
        found: set[Path] = set()
        for path, call in self._trace.calls.items():
            if path and path[:-1] not in found:
                continue
            if not path or (call.inner and self._exceeds(call, wanted)):
                every = [trace.calls[path] for trace in traces if path in trace.calls]
                reason = (
                    _why_whole(every) if len(every) == len(traces) else "is called in training only"
                )
                if not reason:
                    found.add(path)
                else:
                    self.why_whole[path] = reason
        return frozenset(found) if () in found else None

    def _exceeds(self, call: LayerCall, limits: Wanted) -> bool:
        if isinstance(limits, frozenset):
            return call.path in limits
        cost = self.cost(call.path)
        return (
            cost.flops > limits.flops
            or bytes_of(call.layer.trainable_variables) > limits.parameters
            or cost.residual_bytes > limits.kept
        )


def name_of(calls: dict[Path, LayerCall], path: Path) -> str:
    """The names of the layers on the way to a call."""
    return "".join(f"/{calls[path[: i + 1]].layer.name}" for i in range(len(path)))


def _why_whole(calls: list[LayerCall]) -> str:
    """Why a call cannot be parted, if so, given all of its traces."""
    if reason := next((call.whole for call in calls if call.whole), ""):
        return reason
    for inner in calls[0].inner:
        for value in tree.flatten(inner.result):
            if not is_plain(value) and not isinstance(value, keras.Variable):
                kind = type(value).__name__
                return f"calls '{inner.layer.name}', which returns a {kind}, not only tensors"
    kinds = [{(inner.path, id(inner.layer), *inner.kind) for inner in call.inner} for call in calls]
    if any(kind != kinds[0] for kind in kinds[:-1]) or not kinds[-1] <= kinds[0]:
        return "calls other layers for other numbers of samples, or where it does not train"
    if not calls[0].inner:
        return "calls no layers"
    tensors = (tensor for call in calls for inner in call.inner for tensor, _ in inner.marked)
    never_sent = (tf.resource, tf.variant, tf.string)
    if any(t.shape.rank is None or t.dtype in never_sent for t in tensors):
        return "makes what cannot be sent"
    of_known_samples = (t for call in calls[:2] for inner in call.inner for t, _ in inner.marked)
    if any(None in t.shape[:1] for t in of_known_samples):
        return "makes a number of rows that depends on values"
    return ""


def _keeps_specs(traces: list[LayerTrace], path: Path, values: Iterable[Value]) -> bool:
    """Whether all that a call makes is like something that it is given."""

    def spec(tensor: Any, mask: Any) -> tuple[Any, ...]:
        return str(tensor.shape), tensor.dtype, mask is None

    return all(
        {spec(*pair) for pair in trace.calls[path].marked}
        <= {spec(t, get_mask(t)) for t in map(trace.tensor, values)}
        for trace in traces[:-1]
    )


def _made(is_open: bool, few: Any, many: Any, general: Any) -> SeenTensor:
    """Describes a tensor by what it is for two numbers of samples, and for any."""
    sizes: list[Any] = [tuple(tensor.shape) for tensor, _ in (few, many)]
    # Where sizes had to be made up, the data have others.
    shape = tuple(
        size if size is not None or is_open or a != b else a
        for size, a, b in zip(general[0].shape, *sizes, strict=True)
    )
    mask = None if general[1] is None else tuple(general[1].shape)
    grows = sizes[0][:1] != sizes[1][:1] and sizes[0][:1] != SAMPLES[:1]
    if is_open and grows:  # samples merged with steps, whose number was made up
        sizes = [(None, *size[1:]) for size in sizes]
    return SeenTensor(shape, general[0].dtype.name, mask, tuple(sizes))


def _growth(few: Any, many: Any) -> tuple[str, int, int]:
    """A tensor's name, how much more samples make it grow, and the blocks outside of these."""
    known, blocks = few.shape.rank and many.shape.rank, 1
    for size, larger in zip(few.shape, many.shape, strict=False) if known else ():
        if size != larger:
            return few.name, (larger or 0) - (size or 0), blocks
        blocks *= size or 1
    return few.name, 0, blocks


def _short(error: Exception) -> str:
    return f"cannot be called on placeholders ({describe(error)})"
