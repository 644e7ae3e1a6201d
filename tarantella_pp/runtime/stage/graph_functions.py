"""Functions of TensorFlow: compiled ones that cost little to call, and parts of traced graphs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.internals.training import without_graph
from tarantella_pp.partition.graph.traced_costs import bytes_of
from tarantella_pp.partition.graph.traced_costs import frontier as frontier
from tarantella_pp.runtime.weights.slices import lookups_of

# Bytes of a constant that parts of a graph share: below, an argument takes time, too; above,
# TensorFlow computes it anew whenever it is read.
_LARGE, _LARGEST = 2**15, 10 * 2**20


def specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """What a function that is traced for such tensors takes."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


class CompiledFunction:
    """A function compiled for one signature, called with flat tensors.

    `tf.function` matches its arguments against signatures at every call, which takes half a
    millisecond: as long as a small stage computes. A stage always gets what it was compiled for,
    so this calls it directly, in a fifth of the time. Python's graphs go: 7 KB an operation.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> None:
        traced = tf.function(function, input_signature=list(specs), autograph=False)
        concrete = traced.get_concrete_function()
        self._call = without_graph(concrete).call_flat
        self._captured = list(concrete.captured_inputs)

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Calls the function; returns its tensors, flattened."""
        results = self._call(*tensors, *self._captured)
        return results if isinstance(results, list) else []  # TensorFlow gives `None` for nothing

    @classmethod
    def like(
        cls, function: Callable[..., Any], arguments: tuple[Any, ...], any_rows: bool = False
    ) -> CompiledFunction:
        """Compiles a function for nested arguments, `None` among them."""
        return cls(*flattened(function, arguments, any_rows))


class CompiledUpdate:
    """A function without results, compiled for each kind of arguments that it is called with."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: dict[Hashable, CompiledFunction] = {}

    def __call__(self, *arguments: Any) -> None:
        """Calls the function with nested arguments."""
        leaves = tf.nest.flatten(arguments)
        places = tf.nest.pack_sequence_as(arguments, range(len(leaves)))
        kind = (str(places), *map(_spec_of, leaves))
        if kind not in self._compiled:
            self._compiled[kind] = CompiledFunction.like(self._function, arguments)
        self._compiled[kind](*dense_tensors(arguments))


def flattened(
    function: Callable[..., Any], arguments: tuple[Any, ...], any_rows: bool = False
) -> tuple[Callable[..., Any], list[tf.TensorSpec]]:
    """A function of the tensors in nested arguments, `None` among them, and what it takes."""
    packed = tf.nest.map_structure(functools.partial(_spec_of, any_rows=any_rows), arguments)
    specs = tf.nest.flatten(packed, expand_composites=True)

    def of_tensors(*tensors: tf.Tensor) -> Any:
        given = iter(tensors)
        filled = [None if spec is None else next(given) for spec in specs]
        return function(*tf.nest.pack_sequence_as(packed, filled, expand_composites=True))

    return of_tensors, [spec for spec in specs if spec is not None]


def dense_tensors(arguments: Any) -> list[Any]:
    """The tensors in nested arguments, in the order in which `CompiledFunction.like` takes them."""
    return [v for v in tf.nest.flatten(arguments, expand_composites=True) if v is not None]


def _spec_of(value: Any, any_rows: bool = False) -> Any:
    """What a compiled function takes in the place of a value; any number of slices."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        dtypes = value.dtype, value.indices.dtype, value.dense_shape.dtype
        return tf.IndexedSlicesSpec(value.shape, *dtypes, indices_shape=[None])
    return tf.TensorSpec([None, *value.shape[1:]] if any_rows else value.shape, value.dtype)


class FlatGradients:
    """Gradients as their tensors: one, or three of slices, or none; to be made in their graph."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        # Of each sparse gradient, by its place, the indices of each lookup
        self.lookups = {
            i: lookups_of(gradient.indices)
            for i, gradient in enumerate(gradients)
            if isinstance(gradient, tf.IndexedSlices)
        }
        parts = [self._components(i, gradient) for i, gradient in enumerate(gradients)]
        self.tensors = list(itertools.chain(*parts))
        # Makes gradients of other values in the places of `tensors`; does not keep their graph.
        self.rebuilt = functools.partial(_rebuilt, list(map(len, parts)))

    def _components(self, place: int, gradient: Any) -> list[tf.Tensor]:
        if place in self.lookups:
            sizes = tf.stack([tf.size(indices) for indices in self.lookups[place]])
            return [gradient.values, gradient.indices, sizes]
        return [] if gradient is None else [tf.convert_to_tensor(gradient)]


def _rebuilt(sizes: Sequence[int], tensors: Sequence[Any]) -> list[Any]:
    left = iter(tensors)
    values = [tuple(itertools.islice(left, size)) for size in sizes]
    return [value if len(value) == 3 else value[0] if value else None for value in values]


@contextlib.contextmanager
def unoptimized(kind: str = "meta_optimizer") -> Iterator[None]:
    """Keeps TensorFlow from optimizing functions that are called, or from doing it in one way.

    All of it takes long for functions that are called a few times with few samples. Rewritten
    arithmetic is another one in each part of a graph, so that an operation that runs again would
    not give the same bits. Folded constants may be as large as a batch, as masks are, and
    stay in several copies of the graph.
    """
    option, off = ("disable_meta_optimizer", True) if kind == "meta_optimizer" else (kind, False)
    before = tf.config.optimizer.get_experimental_options().get(option, not off)
    tf.config.optimizer.set_experimental_options({option: off})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({option: before})


class SubgraphExtractor:
    """Makes callable parts of one traced graph, with TensorFlow's public graph import.

    `tf.compat.v1.WrappedFunction.prune` would do much the same, but it copies the ancestors of
    feeds as well, and with them writes of variables that must happen only once.
    """

    def __init__(self, function: Any) -> None:
        self._definition = function.graph.as_graph_def(add_shapes=False)
        self.calls_functions = bool(self._definition.library.function)  # loops and branches, too
        self._nodes = {node.name: node for node in self._definition.node}
        captured = function.captured_inputs
        places = function.inputs[len(function.inputs) - len(captured) :]
        self._captures = {_name(p): value for p, value in zip(places, captured, strict=True)}
        self.constants: dict[str, int] = {}

    def share_constants(self, operations: Sequence[tf.Operation]) -> None:
        """Computes large constants that other operations read, and captures them, equal ones once.

        TensorFlow would compute them, too, but keep them for each layer in each part, and if it
        folds constants in some ten copies of graphs: a causal mask for 32 samples of 128 tokens and
        8 heads has 4 MiB.
        """
        self.constants = self._numbered(operations)
        alike: dict[Hashable, list[tf.Tensor]] = {}
        for tensor in (t for op in operations if op.name in self.constants for t in op.outputs):
            numbers = tensor.dtype.is_numpy_compatible and bytes_of(tensor) > _LARGE
            if numbers and any(op.name not in self.constants for op in tensor.consumers()):
                kind = self.constants[tensor.op.name], tensor.value_index
                alike.setdefault(kind, []).append(tensor)
        # TensorFlow keeps no larger ones either, so they pay only if several read the same.
        alike = {k: ts for k, ts in alike.items() if len(ts) > 1 or bytes_of(ts[0]) <= _LARGEST}
        if alike:
            made = self.extract([], [tensors[0] for tensors in alike.values()])
            with unoptimized():
                values = CompiledFunction(made, [])()
            for tensors, value in zip(alike.values(), values, strict=True):
                self._captures |= dict.fromkeys(map(_name, tensors), value)

    def _numbered(self, operations: Iterable[tf.Operation]) -> dict[str, int]:
        """Names of operations that compute with constants alone; equal ones have one number."""
        numbers: dict[Hashable, int] = {}
        found: dict[str, int] = {}
        for op in operations:
            given = [(found.get(tensor.op.name), tensor.value_index) for tensor in op.inputs]
            if op.type == "Placeholder" or any(number is None for number, _ in given):
                continue
            if op.op_def is not None and not op.op_def.is_stateful:
                node = tf.compat.v1.NodeDef(op=op.type, attr=self._nodes[op.name].attr)
                kind = node.SerializeToString(deterministic=True), *given
                found[op.name] = numbers.setdefault(kind, len(numbers))
        return found

    @functools.cached_property
    def _written(self) -> bytes:
        """The graph as what is not compiled yet keeps it: a tenth of its size as objects."""
        return bytes(self._definition.SerializeToString())

    def extract(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation] = (),
        waits: Mapping[str, Iterable[str]] | None = None,
    ) -> Callable[..., list[tf.Tensor]]:
        """Makes a part callable; `waits` names operations that some wait for besides."""
        fed = [_name(tensor) for tensor in feeds]
        names = [_name(tensor) for tensor in fetches]
        there = {*fed, *self._captures}
        inner = [name for name in dict.fromkeys(names) if name not in there]
        wanted = [*inner, *(f"{op.name}:0" for op in effects)]
        nodes, used = self._needed(wanted, there)
        handed = {*used, *names}
        captures = {name: value for name, value in self._captures.items() if name in handed}
        written = self._written

        def call(*values: tf.Tensor) -> list[tf.Tensor]:
            # Called while a function is traced: weights become captures of that function.
            graph = tf.compat.v1.get_default_graph()
            given = {name: graph.capture(value) for name, value in captures.items()}
            given |= dict(zip(fed, values, strict=True))
            known = {name: value for name, value in given.items() if name in used}
            part = _part(written, nodes, waits or {})  # made only if it is called
            imported = tf.graph_util.import_graph_def(
                part, input_map=known, return_elements=inner, name="part"
            )
            given |= dict(zip(inner, imported, strict=True))
            return [given[name] for name in names]

        return call

    def _needed(self, wanted: Iterable[str], given: set[str]) -> tuple[set[str], set[str]]:
        """Names of the nodes above `wanted` and below `given`, and which of `given` they use."""
        nodes: set[str] = set()
        used: set[str] = set()
        todo = list(wanted)  # no recursion: graphs are deeper than Python's stack
        while todo:
            tensor = todo.pop()
            if tensor in given:
                used.add(tensor)
                continue
            name = tensor.rsplit(":", 1)[0]
            if name not in nodes:
                nodes.add(name)
                inputs = (i for i in self._nodes[name].input if not i.startswith("^"))
                todo += [i if ":" in i else f"{i}:0" for i in inputs]
        return nodes, used


def _part(written: bytes, names: set[str], waits: Mapping[str, Iterable[str]]) -> Any:
    """The graph definition of some nodes; order constraints from outside are dropped."""
    whole = tf.compat.v1.GraphDef.FromString(written)
    part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
            del copy.input[:]
            before = [f"^{name}" for name in waits.get(node.name, ()) if name in names]
            copy.input.extend([*kept, *before])
            copy.attr.pop("_class", None)  # asks to stay beside nodes of another part
    return part


def _name(tensor: tf.Tensor) -> str:
    return f"{tensor.op.name}:{tensor.value_index}"


def dependents(seeds: Iterable[tf.Tensor], operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns all operations that depend on some tensors."""
    after = {seed.op for seed in seeds}
    for op in operations:
        if any(t.op in after for t in op.inputs) or any(c in after for c in op.control_inputs):
            after.add(op)
    return after


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns all operations that some tensors depend on, or that have to run before them."""
    seen: set[tf.Operation] = set()
    todo = [tensor.op for tensor in tensors]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return seen


def in_order(
    tensors: Iterable[tf.Tensor], order: Mapping[tf.Operation, int]
) -> tuple[tf.Tensor, ...]:
    """Returns each tensor once, in the order in which they were made."""
    unique = {tensor.ref(): tensor for tensor in tensors}.values()
    return tuple(sorted(unique, key=lambda t: (order[t.op], t.value_index)))
